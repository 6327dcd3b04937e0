// The functions that a driver exports are in package driver; the host calls nothing else.
package main

import _ "nodedock-driver/bindings/wit_exports"

func main() {}
