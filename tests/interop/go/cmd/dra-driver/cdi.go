package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

func cdiKind(driver string) string {
	return driver + "/claim"
}

func cdiDevice(claim types.UID, device string) string {
	return string(claim) + "-" + device
}

func (d *driver) cdiFile(claim types.UID) string {
	return filepath.Join(d.cdiDir, d.name+"-"+string(claim)+".json")
}

// writeCDI writes the CDI file of a claim: a variable for each device.
func (d *driver) writeCDI(claim types.UID, devices []kubeletplugin.Device) error {
	if d.cdiDir == "" {
		return nil
	}
	type edits struct {
		Env []string `json:"env"`
	}
	type device struct {
		Name  string `json:"name"`
		Edits edits  `json:"containerEdits"`
	}
	var list []device
	for _, one := range devices {
		list = append(list, device{cdiDevice(claim, one.DeviceName), edits{[]string{"DRA_DEVICE=" + one.DeviceName}}})
	}
	spec, err := json.Marshal(map[string]any{"cdiVersion": "0.6.0", "kind": cdiKind(d.name), "devices": list})
	if err != nil {
		return err
	}
	// A runtime may look at any time.
	file := d.cdiFile(claim)
	temporary := filepath.Join(d.cdiDir, "."+filepath.Base(file)+".new")
	if err := os.WriteFile(temporary, spec, 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, file)
}

func (d *driver) removeCDI(claim types.UID) error {
	if d.cdiDir == "" {
		return nil
	}
	if err := os.Remove(d.cdiFile(claim)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
