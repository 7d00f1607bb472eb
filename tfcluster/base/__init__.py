"""What every layer may use: errors, names, and data without a library."""
