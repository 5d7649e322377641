"""`python -m cloister.permute.enclave`: start the enclave process."""

from cloister.permute.enclave.process import main

if __name__ == "__main__":
    main()
