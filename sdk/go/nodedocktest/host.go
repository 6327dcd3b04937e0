// Package nodedocktest has a fake host for unit tests of drivers, which need no WebAssembly.
package nodedocktest

import (
	"path"
	"slices"
	"strings"

	nodedock "github.com/nodedock/nodedock/sdk/go"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_claims"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_container_edits"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_device_nodes"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_log"
)

// Host is a node: files and links below /sys, files, device nodes and prepared claims, all in memory.
type Host struct {
	// Files below /sys.
	Files map[string]string
	// HostFiles are outside of /sys and /dev.
	HostFiles map[string]string
	// Nodes below /dev.
	Nodes map[string]nodedock_driver_device_nodes.NodeInfo
	// Claims that are prepared.
	Claims []nodedock_driver_claims.ClaimRecord
	// Failing has the codes of reads below /sys and /dev that fail.
	Failing map[string]string
	// Lines of the log, and values written below /sys, each as path and value.
	Lines  []string
	Writes [][2]string

	links map[string]string
}

// New returns an empty node.
func New() *Host {
	return &Host{
		Files:     map[string]string{},
		HostFiles: map[string]string{},
		Nodes:     map[string]nodedock_driver_device_nodes.NodeInfo{},
		Failing:   map[string]string{},
		links:     map[string]string{},
	}
}

// Link adds a link below /sys; the target is relative to the link's directory, or to /sys if it begins with a slash.
func (h *Host) Link(link, target string) {
	if !strings.HasPrefix(target, "/") {
		target = path.Join("/", path.Dir(link), target)
	}
	h.links[link] = strings.TrimPrefix(path.Clean(target), "/")
}

// Node adds a character device below /dev.
func (h *Host) Node(name string, major, minor uint32) {
	h.Nodes[name] = nodedock_driver_device_nodes.NodeInfo{
		Path: name, Kind: nodedock_driver_container_edits.NodeKindCharacter, Major: major, Minor: minor, Mode: 0o660,
	}
}

// Claim returns a claim of devices of a pool.
func Claim(uid, pool string, devices ...string) nodedock_driver_claims.Claim {
	claim := nodedock_driver_claims.Claim{Id: nodedock_driver_claims.ClaimRef{Namespace: "default", Name: uid, Uid: uid}}
	for _, device := range devices {
		claim.Devices = append(claim.Devices, nodedock_driver_claims.AllocatedDevice{Request: "request", Pool: pool, Device: device})
	}
	return claim
}

func (h *Host) Read(name string) (string, error) {
	if err := h.check(name); err != nil {
		return "", err
	}
	real, err := h.resolve(name)
	if err != nil {
		return "", err
	}
	if text, found := h.Files[real]; found {
		return strings.TrimRight(text, "\n"), nil
	}
	if len(h.children(real)) > 0 {
		return "", nodedock.Invalid("not-a-file", "%s", name)
	}
	return "", nodedock.NotFound("no-such-path", "%s", name)
}

func (h *Host) ReadDir(name string) ([]string, error) {
	if err := h.check(name); err != nil {
		return nil, err
	}
	real, err := h.resolve(name)
	if err != nil {
		return nil, err
	}
	if _, found := h.Files[real]; found {
		return nil, nodedock.Invalid("not-a-directory", "%s", name)
	}
	children := h.children(real)
	if len(children) == 0 {
		return nil, nodedock.NotFound("no-such-path", "%s", name)
	}
	return children, nil
}

func (h *Host) ReadLink(name string) (string, error) {
	if err := h.check(name); err != nil {
		return "", err
	}
	parent, err := h.resolve(path.Dir(name))
	if err != nil {
		return "", err
	}
	real := path.Join(parent, path.Base(name))
	if _, found := h.links[real]; found {
		return h.resolve(real)
	}
	if _, found := h.Files[real]; found || len(h.children(real)) > 0 {
		return "", nodedock.Invalid("not-a-link", "%s", name)
	}
	return "", nodedock.NotFound("no-such-path", "%s", name)
}

func (h *Host) Glob(pattern string) ([]string, error) {
	if err := h.check(pattern); err != nil {
		return nil, err
	}
	paths, err := h.paths()
	if err != nil {
		return nil, err
	}
	return matching(pattern, paths), nil
}

func (h *Host) Write(name, value string) error {
	if _, err := h.Read(name); err != nil {
		return err
	}
	real, err := h.resolve(name)
	if err != nil {
		return err
	}
	h.Files[real] = value
	h.Writes = append(h.Writes, [2]string{name, value})
	return nil
}

func (h *Host) ReadHostFile(name string) (string, error) {
	if err := h.check(name); err != nil {
		return "", err
	}
	text, found := h.HostFiles[name]
	if !found {
		return "", nodedock.NotFound("no-such-path", "%s", name)
	}
	return strings.TrimRight(text, "\n"), nil
}

func (h *Host) StatNode(name string) (nodedock_driver_device_nodes.NodeInfo, error) {
	if err := h.check(name); err != nil {
		return nodedock_driver_device_nodes.NodeInfo{}, err
	}
	node, found := h.Nodes[name]
	if !found {
		return node, nodedock.NotFound("no-such-node", "%s", name)
	}
	return node, nil
}

func (h *Host) GlobNodes(pattern string) ([]nodedock_driver_device_nodes.NodeInfo, error) {
	if err := h.check(pattern); err != nil {
		return nil, err
	}
	var nodes []nodedock_driver_device_nodes.NodeInfo
	names := map[string]bool{}
	for name := range h.Nodes {
		names[name] = true
	}
	for _, name := range matching(pattern, names) {
		nodes = append(nodes, h.Nodes[name])
	}
	return nodes, nil
}

func (h *Host) PreparedClaims() []nodedock_driver_claims.ClaimRecord { return h.Claims }

func (h *Host) Log(_ nodedock_driver_log.Level, message string, fields ...nodedock_driver_common.KeyValue) {
	for _, field := range fields {
		message += " " + field.Key + "=" + field.Value
	}
	h.Lines = append(h.Lines, message)
}

func (h *Host) check(name string) error {
	if code, found := h.Failing[name]; found {
		return nodedock.Unavailable(code, "%s", name)
	}
	return nil
}

// resolve follows the links of a path.
func (h *Host) resolve(name string) (string, error) {
	real := name
	for range 40 {
		link := ""
		for _, prefix := range prefixes(real) {
			if _, found := h.links[prefix]; found {
				link = prefix
				break
			}
		}
		if link == "" {
			return real, nil
		}
		real = h.links[link] + strings.TrimPrefix(real, link)
	}
	return "", nodedock.Invalid("outside-sysfs", "%s", name)
}

func (h *Host) children(directory string) []string {
	found := map[string]bool{}
	for _, name := range h.keys() {
		if below, is := strings.CutPrefix(name, directory+"/"); is {
			child, _, _ := strings.Cut(below, "/")
			found[child] = true
		}
	}
	return sorted(found)
}

func (h *Host) keys() []string {
	var keys []string
	for name := range h.Files {
		keys = append(keys, name)
	}
	for name := range h.links {
		keys = append(keys, name)
	}
	return keys
}

// paths returns all paths, also those of directories and those by links.
func (h *Host) paths() (map[string]bool, error) {
	found := map[string]bool{}
	for _, name := range h.keys() {
		for _, prefix := range prefixes(name) {
			found[prefix] = true
		}
	}
	for link := range h.links {
		target, err := h.resolve(link)
		if err != nil {
			return nil, err
		}
		for _, name := range sorted(found) {
			if below, is := strings.CutPrefix(name, target+"/"); is {
				found[link+"/"+below] = true
			}
		}
	}
	return found, nil
}

func matching(pattern string, names map[string]bool) []string {
	var found []string
	for _, name := range sorted(names) {
		if matches(strings.Split(pattern, "/"), strings.Split(name, "/")) {
			found = append(found, name)
		}
	}
	return found
}

// matches returns whether the segments of a path match those of a glob.
func matches(pattern, name []string) bool {
	if len(pattern) == 0 {
		return len(name) == 0
	}
	if pattern[0] == "**" {
		for skipped := range len(name) + 1 {
			if matches(pattern[1:], name[skipped:]) {
				return true
			}
		}
		return false
	}
	if len(name) == 0 {
		return false
	}
	// Brackets are no part of the contract's globs.
	literal := strings.NewReplacer("[", "\\[", "]", "\\]").Replace(pattern[0])
	is, err := path.Match(literal, name[0])
	return err == nil && is && matches(pattern[1:], name[1:])
}

func prefixes(name string) []string {
	parts := strings.Split(name, "/")
	var found []string
	for end := range parts {
		found = append(found, strings.Join(parts[:end+1], "/"))
	}
	return found
}

func sorted(names map[string]bool) []string {
	var all []string
	for name := range names {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}
