package export_nodedock_driver_health

import "nodedock-driver/driver"

var Check = driver.Check
