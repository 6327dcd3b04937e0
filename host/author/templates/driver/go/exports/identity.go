package export_nodedock_driver_identity

import "nodedock-driver/driver"

var Describe = driver.Describe
