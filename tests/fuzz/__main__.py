from tests.fuzz.driver import main

main()
