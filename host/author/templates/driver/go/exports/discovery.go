package export_nodedock_driver_discovery

import "nodedock-driver/driver"

var Discover = driver.Discover
