"""The commands: what each word on the command line does. ``cli`` calls one of them."""
