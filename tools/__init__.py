"""What builds the package and the site from the sources; not part of the package."""
