// A package with such a file may declare functions that have their bodies elsewhere.
