package export_nodedock_driver_scheduling

import "nodedock-driver/driver"

var Schedule = driver.Schedule
