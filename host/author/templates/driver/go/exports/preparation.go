package export_nodedock_driver_preparation

import "nodedock-driver/driver"

var (
	Prepare   = driver.Prepare
	Unprepare = driver.Unprepare
)
