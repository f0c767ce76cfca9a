import runtime  # before torch (see there)
