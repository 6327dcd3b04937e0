package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/embed"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"nodedock/interop/kubernetes/internal/node"
)

const (
	adminToken = "admin"
	startTime  = 2 * time.Minute
)

// The audit log has each request once, when it is answered, and of slices what was written and what was stored.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
omitManagedFields: true
rules:
  - level: RequestResponse
    verbs: [create, update]
    resources: [{group: resource.k8s.io, resources: [resourceslices]}]
  - level: Metadata
`

// apiServer serves the API on a free port of 127.0.0.1. Its files are in --dir, which it removes at its end.
// Its only event is "ready" with what a client needs.
func apiServer(args []string) error {
	flags := flag.NewFlagSet("api-server", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of its files")
	if err := flags.Parse(args); err != nil {
		return err
	}
	store, err := startStore(filepath.Join(*dir, "etcd"))
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	files, err := writeFiles(*dir)
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- runServer(context.WithoutCancel(ctx), listener, store.Clients[0].Addr().String(), files)
	}()
	config := &rest.Config{
		Host:            "https://" + listener.Addr().String(),
		BearerToken:     adminToken,
		TLSClientConfig: rest.TLSClientConfig{CAData: files.certificate},
	}
	if err := untilReady(ctx, config, ended); err != nil {
		return err
	}
	node.Emit(map[string]any{
		"event": "ready", "url": config.Host, "ca": string(files.certificate), "token": adminToken, "audit": files.audit,
	})
	go func() {
		node.UntilInputEnds()
		cancel()
	}()
	select {
	case <-ctx.Done():
		// The server ends with the process. Its store must not write into a directory that is being removed.
		store.Server.HardStop()
		return os.RemoveAll(*dir)
	case err := <-ended:
		return fmt.Errorf("the server ended: %w", err)
	}
}

// startStore returns a store that listens on a free port and never waits for a disk.
func startStore(dir string) (*embed.Etcd, error) {
	config := embed.NewConfig()
	anyPort := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	config.Dir = dir
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{anyPort}, []url.URL{anyPort}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{anyPort}, []url.URL{anyPort}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	config.LogLevel = "error"
	config.UnsafeNoFsync = true
	store, err := embed.StartEtcd(config)
	if err != nil {
		return nil, err
	}
	select {
	case <-store.Server.ReadyNotify():
		return store, nil
	case err := <-store.Err():
		return nil, err
	case <-time.After(startTime):
		store.Close()
		return nil, errors.New("it does not become ready")
	}
}

type serverFiles struct {
	dir, cert, key, signingKey, tokens, policy, audit string
	certificate                                       []byte
}

func writeFiles(dir string) (serverFiles, error) {
	path := func(name string) string { return filepath.Join(dir, name) }
	files := serverFiles{
		dir: dir, cert: path("tls.crt"), key: path("tls.key"), signingKey: path("sa.key"),
		tokens: path("tokens.csv"), policy: path("audit-policy.yaml"), audit: path("audit.log"),
	}
	certificate, key, err := certutil.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return files, err
	}
	files.certificate = certificate
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return files, err
	}
	signingKey, err := keyutil.MarshalPrivateKeyToPEM(signer)
	if err != nil {
		return files, err
	}
	contents := map[string][]byte{
		files.cert: certificate, files.key: key, files.signingKey: signingKey, files.policy: []byte(auditPolicy),
		files.tokens: []byte(adminToken + `,admin,admin,"system:masters"` + "\n"),
	}
	for file, content := range contents {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			return files, err
		}
	}
	return files, nil
}

// runServer is the program kube-apiserver but for the listener, which is open already: no other process can take its port.
func runServer(ctx context.Context, listener net.Listener, store string, files serverFiles) error {
	opts := options.NewServerRunOptions()
	flags := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	namedFlags := opts.Flags()
	for _, set := range namedFlags.FlagSets {
		flags.AddFlagSet(set)
	}
	err := flags.Parse([]string{
		"--etcd-servers=http://" + store,
		"--bind-address=127.0.0.1",
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.0.0.0/24",
		"--tls-cert-file=" + files.cert,
		"--tls-private-key-file=" + files.key,
		"--cert-dir=" + files.dir,
		"--token-auth-file=" + files.tokens,
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=" + files.signingKey,
		"--service-account-key-file=" + files.signingKey,
		"--runtime-config=resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true",
		// No controller removes what this plugin adds to a new node.
		"--disable-admission-plugins=TaintNodesByCondition",
		"--audit-policy-file=" + files.policy,
		"--audit-log-path=" + files.audit,
		// A clean end waits for nothing here.
		"--shutdown-delay-duration=0s",
	})
	if err != nil {
		return err
	}
	opts.SecureServing.Listener = listener
	opts.SecureServing.BindPort = listener.Addr().(*net.TCPAddr).Port
	if err := opts.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return err
	}
	completed, err := opts.Complete(ctx)
	if err != nil {
		return err
	}
	if errs := completed.Validate(); len(errs) != 0 {
		return utilerrors.NewAggregate(errs)
	}
	return app.Run(ctx, completed)
}

func untilReady(ctx context.Context, config *rest.Config, ended <-chan error) error {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	deadline := time.After(startTime)
	for {
		_, last := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if last == nil {
			return nil
		}
		select {
		case err := <-ended:
			return fmt.Errorf("the server ended: %w", err)
		case <-deadline:
			return fmt.Errorf("the server does not become ready: %w", last)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
