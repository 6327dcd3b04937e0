// Command kubelet handles the sockets of plugins as a kubelet does, with the official types: it watches plugins_registry, registers
// DRA plugins, calls them for claims, watches their health; it serves kubelet.sock for device plugins and calls those that register. It
// reads commands from standard input and writes events to standard output, one JSON object per line each.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// A kubelet's deadline for a call.
const callDeadline = 45 * time.Second

// claim is a claim as a kubelet names it.
type claim struct {
	Namespace string `json:"namespace"`
	UID       string `json:"uid"`
	Name      string `json:"name"`
}

// command is one line of standard input.
type command struct {
	ID       int      `json:"id"`
	Do       string   `json:"do"`
	Driver   string   `json:"driver"`
	Version  string   `json:"version"`
	Claims   []claim  `json:"claims"`
	Resource string   `json:"resource"`
	Devices  []string `json:"devices"`
	Size     int32    `json:"size"`
}

// reporter writes events of several goroutines.
type reporter struct {
	mutex   sync.Mutex
	encoder *json.Encoder
}

func (r *reporter) say(event map[string]any) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	_ = r.encoder.Encode(event)
}

// dial dials as the kubelet does: the bare path is the target, so the authority is the path, percent-encoded.
func dial(path string) (*grpc.ClientConn, error) {
	dialer := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	return grpc.NewClient("passthrough:///"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dialer))
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kubelet:", err)
		os.Exit(1)
	}
}

func run() error {
	root := flag.String("root", "/var/lib/kubelet", "the directory with plugins_registry and device-plugins")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	out := &reporter{encoder: json.NewEncoder(os.Stdout)}
	drivers := &drivers{out: out, connected: map[string]*driver{}}
	if err := drivers.follow(ctx, filepath.Join(*root, "plugins_registry")); err != nil {
		return err
	}
	resources := &resources{out: out, directory: filepath.Join(*root, "device-plugins"), plugins: map[string]*plugin{}}
	if err := resources.serve(ctx); err != nil {
		return err
	}
	defer resources.stop()
	out.say(map[string]any{"event": "started"})

	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var asked command
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			return fmt.Errorf("a command that is no JSON: %w", err)
		}
		go answer(ctx, out, drivers, resources, asked)
	}
	return lines.Err()
}

// answer executes a command and writes the result, with the command's id.
func answer(ctx context.Context, out *reporter, drivers *drivers, resources *resources, asked command) {
	ctx, cancel := context.WithTimeout(ctx, callDeadline)
	defer cancel()
	var result any
	var err error
	switch asked.Do {
	case "prepare":
		result, err = drivers.prepare(ctx, asked)
	case "unprepare":
		result, err = drivers.unprepare(ctx, asked)
	case "allocate":
		result, err = resources.allocate(ctx, asked)
	case "prefer":
		result, err = resources.prefer(ctx, asked)
	case "restart":
		err = resources.restart(ctx)
	default:
		err = fmt.Errorf("unknown command %q", asked.Do)
	}
	event := map[string]any{"event": "answer", "id": asked.ID, "result": result}
	if err != nil {
		event["error"] = err.Error()
	}
	out.say(event)
}
