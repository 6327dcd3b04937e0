module nodedock-driver

go 1.25
