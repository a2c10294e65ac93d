from tests.core.random_programs.campaign import main

if __name__ == "__main__":
    main()
