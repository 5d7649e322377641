"""The two parties of a round connected by Flower: SuperLink and SuperNodes over TLS with registered keys.

Only this folder knows Flower, and only its functions import it: the file mode and `simulate` need nothing of it.
"""
