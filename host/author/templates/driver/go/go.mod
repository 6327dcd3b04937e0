module nodedock-driver

go 1.25

require (
	github.com/nodedock/nodedock/sdk/go v0.0.0
	go.bytecodealliance.org/pkg v0.2.3
)

replace github.com/nodedock/nodedock/sdk/go => ./nodedock
