__version__ = "0"  # a package of this name exists elsewhere and is probed for its version; never install it beside ours
