def main(args): pass
