from magicdec.cli import main

main()
