//! A container with the prepared devices: podman on a directory that contains only busybox, so that it pulls no image and writes
//! nothing outside the demo's root.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::answers::check_plain;
use super::dock::CdiSpec;
use super::{command, quote};
use crate::machine::Podman;
use crate::shell::{self, Interrupt};

const RUN_LIMIT: Duration = Duration::from_secs(60);
const DIRECTORIES: [&str; 6] = ["bin", "dev", "etc", "proc", "sys", "tmp"];
const APPLETS: [&str; 3] = ["sh", "ls", "env"];

pub(super) struct Sandbox<'a> {
    podman: &'a Podman,
    rootfs: PathBuf,
    storage: PathBuf,
}

impl<'a> Sandbox<'a> {
    pub(super) fn new(podman: &'a Podman, root: &Path) -> Result<Self> {
        let rootfs = root.join("rootfs");
        fill(&rootfs, &podman.busybox).with_context(|| format!("filling {}", rootfs.display()))?;
        Ok(Self {
            podman,
            rootfs,
            storage: root.join("podman"),
        })
    }

    /// Starts the container and prints the devices that it sees.
    pub(super) fn look_at(
        &self,
        interrupt: &Interrupt,
        devices: &[&str],
        spec: &CdiSpec,
    ) -> Result<()> {
        check_plain(&spec.promise.nodes)?;
        let mut run = self.command(devices, &spec.promise.script());
        command(&shell::line(&run));
        let output = interrupt.output(&mut run, RUN_LIMIT)?;
        let (seen, problem) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        ensure!(
            output.status.success(),
            "the container failed: {}\n{seen}{problem}",
            output.status
        );
        spec.promise.seen(&seen)?.into_iter().for_each(quote);
        Ok(())
    }

    fn command(&self, devices: &[&str], script: &str) -> Command {
        let mut command = Command::new(&self.podman.program);
        command.arg("--root").arg(self.storage.join("root"));
        command.arg("--runroot").arg(self.storage.join("run"));
        command.arg("--tmpdir").arg(self.storage.join("tmp"));
        // Overlay would leave a mount on its directory, and then the root could not be removed.
        command
            .arg("--storage-driver=vfs")
            .arg("--runtime")
            .arg(&self.podman.runtime);
        // Needs neither systemd nor a journal, nor higher limits than the machine allows.
        command.args([
            "--cgroup-manager=cgroupfs",
            "--events-backend=none",
            "run",
            "--rm",
            "--network=none",
        ]);
        command.args([
            "--ulimit",
            "nofile=16384:16384",
            "--ulimit",
            "nproc=32768:32768",
        ]);
        devices.iter().for_each(|device| {
            command.args(["--device", device]);
        });
        command
            .arg("--rootfs")
            .arg(&self.rootfs)
            .args(["/bin/sh", "-c", script]);
        command
    }
}

fn fill(rootfs: &Path, busybox: &Path) -> Result<()> {
    for directory in DIRECTORIES {
        fs::create_dir_all(rootfs.join(directory))?;
    }
    fs::copy(busybox, rootfs.join("bin/busybox"))?;
    for applet in APPLETS {
        symlink("busybox", rootfs.join("bin").join(applet))?;
    }
    Ok(())
}
