package nodedock

import (
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_claims"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_device_nodes"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_host_files"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_log"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_prepared_claims"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_sysfs"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_sysfs_write"
	types "go.bytecodealliance.org/pkg/wit/types"
)

// Host has the functions of the host that most drivers call, with problems as errors. Unit tests have a fake one, of package nodedocktest.
// The others are functions of the bindings, such as those of nodedock_driver_net_interfaces.
type Host interface {
	// Read returns the content of a file below /sys, without the trailing line end.
	Read(path string) (string, error)
	// ReadDir returns the names in a directory below /sys.
	ReadDir(path string) ([]string, error)
	// ReadLink returns the target of a link below /sys, relative to /sys.
	ReadLink(path string) (string, error)
	// Glob returns the paths below /sys that match.
	Glob(pattern string) ([]string, error)
	// Write writes one value below /sys, during prepare and unprepare.
	Write(path, value string) error
	// ReadHostFile returns the content of a file outside of /sys and /dev.
	ReadHostFile(path string) (string, error)
	// StatNode returns the metadata of a node below /dev.
	StatNode(path string) (nodedock_driver_device_nodes.NodeInfo, error)
	// GlobNodes returns the nodes below /dev that match.
	GlobNodes(pattern string) ([]nodedock_driver_device_nodes.NodeInfo, error)
	// PreparedClaims returns the driver's claims.
	PreparedClaims() []nodedock_driver_claims.ClaimRecord
	// Log writes a line to the host's log.
	Log(level nodedock_driver_log.Level, message string, fields ...nodedock_driver_common.KeyValue)
}

// Imports returns the host of a driver on a node. It works in WebAssembly only.
func Imports() Host { return imports{} }

type imports struct{}

func (imports) Read(path string) (string, error) {
	return value(nodedock_driver_sysfs.Read(path))
}

func (imports) ReadDir(path string) ([]string, error) {
	return value(nodedock_driver_sysfs.ReadDir(path))
}

func (imports) ReadLink(path string) (string, error) {
	return value(nodedock_driver_sysfs.ReadLink(path))
}

func (imports) Glob(pattern string) ([]string, error) {
	return value(nodedock_driver_sysfs.Glob(pattern))
}

func (imports) Write(path, text string) error {
	_, err := value(nodedock_driver_sysfs_write.Write(path, text))
	return err
}

func (imports) ReadHostFile(path string) (string, error) {
	return value(nodedock_driver_host_files.Read(path))
}

func (imports) StatNode(path string) (nodedock_driver_device_nodes.NodeInfo, error) {
	return value(nodedock_driver_device_nodes.Stat(path))
}

func (imports) GlobNodes(pattern string) ([]nodedock_driver_device_nodes.NodeInfo, error) {
	return value(nodedock_driver_device_nodes.Glob(pattern))
}

func (imports) PreparedClaims() []nodedock_driver_claims.ClaimRecord {
	page := nodedock_driver_prepared_claims.All(types.None[string]())
	claims := page.Claims
	for page.Next.IsSome() {
		page = nodedock_driver_prepared_claims.All(page.Next)
		claims = append(claims, page.Claims...)
	}
	return claims
}

func (imports) Log(level nodedock_driver_log.Level, message string, fields ...nodedock_driver_common.KeyValue) {
	nodedock_driver_log.Write(level, message, fields)
}

func value[T any](result types.Result[T, nodedock_driver_common.Problem]) (T, error) {
	if result.IsErr() {
		var none T
		return none, &Problem{result.Err()}
	}
	return result.Ok(), nil
}
