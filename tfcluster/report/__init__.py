"""A run as one HTML file: history from the record, pictures, the page.

Everything here is pure; ``commands.report`` reads the record and writes the file.
"""
