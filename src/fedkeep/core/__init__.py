"""Records, arithmetic on parameters, random streams and errors: the floor that everything stands on."""
