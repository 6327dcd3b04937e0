// Command dra-driver is a DRA driver on the official helper library, as a vendor would write one: it registers in a registry directory,
// prepares and unprepares claims, and writes its calls to standard output, one JSON object per line.
//
// The helper reads each claim from an API server before it calls the driver. Here that is a server inside this process: with --claims it
// serves the claims of a file, otherwise every requested claim, with one device of this driver; with --server or --kubeconfig it is that
// one.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "dra-driver:", err)
		os.Exit(1)
	}
}

func run() error {
	name := flag.String("driver-name", "gpu.example.com", "name of the driver")
	registryDir := flag.String("registry-dir", kubeletplugin.KubeletRegistryDir, "directory of registration sockets")
	dataDir := flag.String("data-dir", "", "directory of the DRA socket (default: the helper's)")
	node := flag.String("node-name", "node", "name of the node, and of the pool of claims that are made up")
	request := flag.String("request", "device", "name of the request in claims that are made up")
	updateUID := flag.String("rolling-update-uid", "", "UID of this instance; not empty: several may run at a time")
	failClaim := flag.String("fail-claim", "", "regular expression of the names of claims that are refused")
	claimsFile := flag.String("claims", "", "JSON file with a list of ResourceClaims (default: each claim exists)")
	server := flag.String("server", "", "URL of an API server to read claims from, which takes the token of the variable TOKEN")
	kubeconfig := flag.String("kubeconfig", "", "file that describes an API server to read claims from, in place of --server")
	serverCA := flag.String("server-ca", "", "file with the certificate of that server")
	cdiDir := flag.String("cdi-dir", "", "directory to write a CDI spec for each claim to (default: none is written)")
	checkpoint := flag.String("checkpoint", "", "file to store the prepared claims in, durably (default: none is written)")
	devices := flag.Int("devices", 0, "number of devices, device-0 and so on, to publish in a ResourceSlice (default: none is published)")
	klogFlags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(klogFlags)
	verbosity := flag.Int("v", 2, "verbosity of the log on standard error")
	flag.Parse()
	if err := klogFlags.Set("v", fmt.Sprint(*verbosity)); err != nil {
		return err
	}
	refused, err := pattern(*failClaim)
	if err != nil {
		return fmt.Errorf("--fail-claim: %w", err)
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)

	record := &recorder{instance: *updateUID}
	api := &claimServer{driver: *name, pool: *node, request: *request}
	if err := api.load(*claimsFile); err != nil {
		return fmt.Errorf("--claims: %w", err)
	}
	address, err := api.start()
	if err != nil {
		return fmt.Errorf("start the server of claims: %w", err)
	}
	config := &rest.Config{Host: address}
	if *server != "" {
		// Without the client's own pause between requests.
		config = &rest.Config{Host: *server, BearerToken: os.Getenv("TOKEN"), QPS: -1}
		config.CAFile = *serverCA
	}
	if *kubeconfig != "" {
		if config, err = clientcmd.BuildConfigFromFlags("", *kubeconfig); err != nil {
			return err
		}
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	plugin := &driver{name: *name, refused: refused, cdiDir: *cdiDir, fail: fail, checkpoint: *checkpoint}
	plugin.prepared = map[types.UID][]kubeletplugin.Device{}
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(*name),
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(*node),
		kubeletplugin.RegistrarDirectoryPath(*registryDir),
		kubeletplugin.RollingUpdate(types.UID(*updateUID)),
		kubeletplugin.GRPCInterceptor(api.learn),
		kubeletplugin.GRPCInterceptor(record.call),
	}
	if *dataDir != "" {
		options = append(options, kubeletplugin.PluginDataDirectoryPath(*dataDir))
	}
	helper, err := kubeletplugin.Start(ctx, plugin, options...)
	if err != nil {
		return err
	}
	if *devices > 0 {
		if err := helper.PublishResources(ctx, inventory(*node, *devices)); err != nil {
			return err
		}
	}
	record.write(event{Event: "started"})
	<-ctx.Done()
	helper.Stop()
	record.write(event{Event: "stopped"})
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// inventory is one pool with devices that have no attributes.
func inventory(pool string, count int) resourceslice.DriverResources {
	var devices []resourceapi.Device
	for i := range count {
		devices = append(devices, resourceapi.Device{Name: fmt.Sprintf("device-%d", i)})
	}
	slices := []resourceslice.Slice{{Devices: devices}}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: slices}}}
}

func pattern(text string) (*regexp.Regexp, error) {
	if text == "" {
		return nil, nil
	}
	return regexp.Compile(text)
}

// driver is the part that a vendor writes.
type driver struct {
	name    string
	refused *regexp.Regexp
	cdiDir  string
	fail    context.CancelCauseFunc
	// checkpoint is the file that has what is prepared, if there is one. The helper makes one call at a time.
	checkpoint string
	prepared   map[types.UID][]kubeletplugin.Device
}

// store replaces the checkpoint durably, as the kubelet's checkpoint manager does, which drivers use.
func (d *driver) store() error {
	if d.checkpoint == "" {
		return nil
	}
	text, err := json.Marshal(d.prepared)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(d.checkpoint), "checkpoint-*")
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := file.Write(text); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	return os.Rename(file.Name(), d.checkpoint)
}

func (d *driver) PrepareResourceClaims(
	_ context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		devices, err := d.prepare(claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

func (d *driver) prepare(claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if d.refused != nil && d.refused.MatchString(claim.Name) {
		return nil, fmt.Errorf("claim %s/%s is refused by --fail-claim", claim.Namespace, claim.Name)
	}
	var devices []kubeletplugin.Device
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.name {
			continue
		}
		devices = append(devices, kubeletplugin.Device{
			Requests:     []string{result.Request},
			PoolName:     result.Pool,
			DeviceName:   result.Device,
			CDIDeviceIDs: []string{cdiKind(d.name) + "=" + cdiDevice(claim.UID, result.Device)},
			ShareID:      result.ShareID,
		})
	}
	if err := d.writeCDI(claim.UID, devices); err != nil {
		return nil, err
	}
	d.prepared[claim.UID] = devices
	return devices, d.store()
}

func (d *driver) UnprepareResourceClaims(
	_ context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		delete(d.prepared, claim.UID)
		results[claim.UID] = errors.Join(d.removeCDI(claim.UID), d.store())
	}
	return results, nil
}

func (d *driver) HandleError(_ context.Context, err error, msg string) {
	klog.ErrorS(err, msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.fail(fmt.Errorf("%s: %w", msg, err))
	}
}

func (d *driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}
