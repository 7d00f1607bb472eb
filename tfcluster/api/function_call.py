"""stub"""


def run() -> None: ...
