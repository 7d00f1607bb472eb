"""A run as one HTML file: its record, what is made of it, pictures, the page.

Everything here is pure; ``commands.report`` reads the record and writes the file.
"""
