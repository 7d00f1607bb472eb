"""A run as one HTML file: history from the record, pictures, the page.

Everything here is pure; ``commands.report_trace`` reads the record and writes the file.
"""
