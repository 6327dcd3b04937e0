//! Verifies container edits: each entry is checked against the grant and against the node before it is used.
//!
//! Mounts and hooks are files, and reading them may hang; the caller takes care of that. Returns the edits completed with the node's facts.

use std::path::Path;

use rustix::fs::FileType;

use crate::bindings::nodedock::driver::device_nodes::NodeInfo;
use crate::convert::node_kind;
use crate::host_functions::host_files::FilesRoot;
use crate::host_functions::nodes::DevRoot;
use nodedock_core::edit_sources::EditSources;
use nodedock_core::hardware::Hardware;
use nodedock_core::sysfs::SysfsRoot;
use nodedock_core::sysfs::in_use::NodeUse;
use nodedock_model::grant::{Effective, Naming, ceiling};
use nodedock_model::{
    DeviceAccess, DeviceNode, Edits, Hook, IntelRdt, Mount, NodeKind, PreparedClaim, Problem,
    ProblemCode, ProblemKind,
};

/// Never covered in a container: the kernel's own file systems, files by which the dynamic loader runs code in every program, as
/// some environment variables do that have to be granted by name, and what the host says of all drivers' devices (`/var/run` is a
/// link to `/run` in most images).
const NEVER_COVERED: &[&str] = &[
    "/proc",
    "/sys",
    "/etc/ld.so.preload",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/run/kubernetes.io/dra-device-attributes",
    nodedock_core::device_metadata::CONTAINER_DIR,
];

/// Options of a bind mount that remove permissions or say how it is made. None that adds permissions (`suid`, `dev`), none that propagates
/// mounts between the node and the container (`shared`, `slave`), and none that takes along what is mounted below (`rbind`): only the source
/// itself is checked.
const MOUNT_OPTIONS: &[&str] = &[
    "bind",
    "noatime",
    "nodev",
    "nodiratime",
    "noexec",
    "nosuid",
    "private",
    "relatime",
    "ro",
    "rprivate",
    "rw",
];

/// Checks edits against a grant and the node.
pub(crate) struct Verifier<'a> {
    pub(crate) effective: &'a Effective,
    pub(crate) dev: &'a DevRoot,
    pub(crate) files: &'a FilesRoot,
    pub(crate) sysfs: &'a SysfsRoot,
    pub(crate) hardware: &'a Hardware,
}

fn refused(what: &str, why: impl std::fmt::Display) -> Problem {
    Problem::denied(ProblemCode::EditDenied, format!("{what}: {why}"))
}

fn wrong(what: &str, why: impl std::fmt::Display) -> Problem {
    Problem::invalid(ProblemCode::EditInvalid, format!("{what}: {why}"))
}

impl Verifier<'_> {
    fn sources(&self) -> EditSources<'_> {
        EditSources::of(self.hardware)
    }

    /// Returns a prepared claim whose edits are granted and true.
    pub(crate) fn claim(&self, mut claim: PreparedClaim) -> Result<PreparedClaim, Problem> {
        claim.edits = self.edits(claim.edits)?;
        if let Some(key) = claim
            .annotations
            .keys()
            .find(|key| !self.effective.allows_annotation(key))
        {
            return Err(refused(
                &format!("annotation {key}"),
                "it is not granted (annotations)",
            ));
        }
        for device in &mut claim.devices {
            if let DeviceAccess::Edits(edits) = &mut device.access {
                *edits = self.edits(std::mem::take(edits))?;
            }
        }
        Ok(claim)
    }

    pub(crate) fn edits(&self, mut edits: Edits) -> Result<Edits, Problem> {
        self.env(&edits.env)?;
        for node in &mut edits.device_nodes {
            self.device_node(node)?;
        }
        for mount in &mut edits.mounts {
            self.mount(mount)?;
        }
        for device in &edits.net_devices {
            let what = format!("net device {}", device.host_interface);
            if !self.effective.allows_net_device(&device.host_interface) {
                return Err(refused(&what, "it is not granted (netDevices)"));
            }
            if !self
                .sysfs
                .exists(&format!("class/net/{}", device.host_interface))?
            {
                let message = format!("{what}: the node has no such interface");
                return Err(Problem::unavailable(ProblemCode::EditInvalid, message));
            }
            if let Some(above) = self.sysfs.interface_above(&device.host_interface)? {
                return Err(refused(
                    &what,
                    format!("the node uses it: it is part of a bond, bridge or VLAN ({above})"),
                ));
            }
        }
        for hook in &mut edits.hooks {
            self.hook(hook)?;
        }
        if edits.additional_gids.contains(&0) {
            return Err(refused(
                "additional groups",
                "the group of root is never given",
            ));
        }
        if let Some(group) = edits
            .additional_gids
            .iter()
            .find(|group| !self.effective.allows_group(**group))
        {
            return Err(refused(
                &format!("additional group {group}"),
                "it is not granted (groups)",
            ));
        }
        edits
            .intel_rdt
            .as_ref()
            .map_or(Ok(()), |rdt| self.intel_rdt(rdt))?;
        Ok(edits)
    }

    /// A class of service is shared by everything in it, so that its schemata are granted with its name.
    fn intel_rdt(&self, rdt: &IntelRdt) -> Result<(), Problem> {
        match &rdt.clos_id {
            None => Err(refused(
                "Intel RDT",
                "it names no class of service, and only those of the grant are given (rdtClasses)",
            )),
            Some(class) if !self.effective.allows_rdt_class(class) => Err(refused(
                &format!("class of service {class}"),
                "it is not granted (rdtClasses)",
            )),
            Some(_) => Ok(()),
        }
    }

    fn env(&self, env: &[(String, String)]) -> Result<(), Problem> {
        match env
            .iter()
            .find(|(name, _)| !self.effective.allows_env(name))
        {
            Some((name, _)) => Err(refused(&format!("env {name}"), "it is not granted (env)")),
            None => Ok(()),
        }
    }

    fn device_node(&self, node: &mut DeviceNode) -> Result<(), Problem> {
        let path = node.node_path().to_owned();
        let what = format!("device node {path}");
        in_container(&what, &node.path)?;
        if !self.effective.allows_device_node(&path, Naming::Glob) {
            return Err(refused(&what, "it is not granted (deviceNodes)"));
        }
        let found = self
            .dev
            .stat(&path, self.sysfs)
            .map_err(|problem| unseen(&what, problem))?;
        found
            .check_grant(self.effective)
            .map_err(|problem| refused(&what, problem.message))?;
        let (found, subsystem) = (found.info, found.subsystem);
        let kind = node_kind(found.kind);
        if kind == NodeKind::Block && found.sysfs_path.is_none() {
            let message = format!("{what}: the kernel does not show which device it is");
            return Err(Problem::unavailable(ProblemCode::EditDenied, message));
        }
        // A disk on USB can be reached by the node of its USB device too.
        let may_be_disk = kind == NodeKind::Block || subsystem.as_deref() == Some("usb");
        if let Some(directory) = found.sysfs_path.as_ref().filter(|_| may_be_disk) {
            let (proc, dev) = (self.hardware.proc(), self.hardware.dev());
            let node = NodeUse {
                sysfs: self.sysfs,
                proc: &proc,
                dev: &dev,
            };
            if let Some(reason) = node.block_device(directory)? {
                let message = format!("{what}: the node uses it: {reason}");
                return Err(Problem::conflict(ProblemCode::EditDenied, message));
            }
        }
        as_claimed(&what, node, kind, &found)?;
        node.kind = Some(kind);
        if kind != NodeKind::Fifo {
            node.major = Some(found.major);
            node.minor = Some(found.minor);
        }
        Ok(())
    }

    fn mount(&self, mount: &mut Mount) -> Result<(), Problem> {
        let what = format!("mount {}", mount.host_path);
        in_container(&what, &mount.container_path)?;
        // Checked first: what is never mounted, or not granted, is not even looked at.
        self.source(&what, &mount.host_path)?;
        let found = self.files.resolve(&mount.host_path);
        // A missing source may be installed later: the refusal is not permanent.
        let (real, kind) = found.map_err(|problem| unseen(&what, problem))?;
        self.source(&what, &real)?;
        if !matches!(kind, FileType::Directory | FileType::RegularFile) {
            return Err(refused(
                &what,
                "its source is neither a directory nor a regular file",
            ));
        }
        if kind == FileType::RegularFile && Path::new(&real).parent() == Some(Path::new("/etc")) {
            return Err(refused(
                &what,
                "the node's own configuration is never mounted",
            ));
        }
        self.sources()
            .check_mount(&real)
            .map_err(|problem| unseen(&what, problem))?;
        if mount
            .fs_type
            .as_deref()
            .is_some_and(|kind| !matches!(kind, "" | "bind" | "none"))
        {
            return Err(refused(&what, "only bind mounts are made"));
        }
        if let Some(option) = mount
            .options
            .iter()
            .find(|option| !MOUNT_OPTIONS.contains(&option.as_str()))
        {
            return Err(refused(
                &what,
                format!("the option {option:?} is not allowed"),
            ));
        }
        let [is_ro, is_rw] =
            ["ro", "rw"].map(|option| mount.options.iter().any(|given| given == option));
        match (is_ro, is_rw) {
            (true, true) => return Err(wrong(&what, "it is both \"ro\" and \"rw\"")),
            (true, false) => {}
            (false, asks) => match self.writable(&real) {
                Ok(()) => {}
                Err(why) if asks => return Err(refused(&what, why)),
                Err(_) => mount.options.push("ro".to_owned()),
            },
        }
        // Without it, runtimes mount a file system.
        if !mount.options.iter().any(|option| option == "bind") {
            mount.options.push("bind".to_owned());
        }
        // The checked path is the one that is mounted: a link may change.
        mount.host_path = real;
        Ok(())
    }

    /// Checks that a source may be mounted at all.
    fn source(&self, what: &str, path: &str) -> Result<(), Problem> {
        let Some(naming) = ceiling::mount_source(path) else {
            return Err(refused(what, format!("{path} is never mounted")));
        };
        if self.effective.allows_mount(path, naming) {
            return Ok(());
        }
        Err(refused(
            what,
            format!("{path} is not granted{} (mounts)", how(naming)),
        ))
    }

    fn writable(&self, path: &str) -> Result<(), String> {
        let Some(naming) = ceiling::writable_source(path) else {
            return Err(format!(
                "no container may write to {path}, whatever is granted"
            ));
        };
        match self.effective.allows_writable_mount(path, naming) {
            true => Ok(()),
            false => Err(format!(
                "{path} is not granted{} with \":rw\" (mounts)",
                how(naming)
            )),
        }
    }

    fn hook(&self, hook: &mut Hook) -> Result<(), Problem> {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let what = format!("hook {}", hook.path);
        if !self.effective.allows_hook(&hook.path) {
            return Err(refused(
                &what,
                "the operator has not granted this very path (hooks)",
            ));
        }
        // It runs as root on the node, where such a variable does even more harm than in a container.
        self.env(&hook.env).map_err(|problem| Problem {
            message: format!("{what}: {}", problem.message),
            ..problem
        })?;
        let (real, _) = self
            .files
            .resolve(&hook.path)
            .map_err(|problem| unseen(&what, problem))?;
        self.sources()
            .check_way(&real)
            .map_err(|problem| unseen(&what, problem))?;
        let program = std::fs::metadata(self.sources().place(&real));
        let program = program.map_err(|error| {
            Problem::unavailable(ProblemCode::IoError, format!("{what}: {error}"))
        })?;
        let mode = program.permissions().mode();
        if !program.is_file() || mode & 0o111 == 0 {
            return Err(wrong(&what, "it is not a program"));
        }
        if program.uid() != 0 || mode & 0o022 != 0 {
            return Err(refused(&what, "others than root can change the program"));
        }
        // The checked path is the one that runs: a link may change.
        hook.path = real;
        Ok(())
    }
}

/// Returns the form in which a grant has to name something, for messages.
fn how(naming: Naming) -> &'static str {
    match naming {
        Naming::Glob => "",
        Naming::Directory(_) => " by a glob that names the vendor's directory",
        Naming::Path => " by its exact path",
    }
}

fn in_container(what: &str, path: &str) -> Result<(), Problem> {
    let inside = Path::new(path);
    let covered = NEVER_COVERED
        .iter()
        .find(|never| inside.starts_with(never) || Path::new(never).starts_with(inside));
    match covered {
        None => Ok(()),
        Some(never) => Err(refused(
            what,
            format!("at {path} in a container nothing is put, because of {never}"),
        )),
    }
}

/// A missing node may appear without a change of the driver's devices: the refusal is not permanent.
fn unseen(what: &str, problem: Problem) -> Problem {
    let kind = if problem.kind == ProblemKind::NotFound {
        ProblemKind::Unavailable
    } else {
        problem.kind
    };
    Problem {
        kind,
        message: format!("{what}: {}", problem.message),
        ..problem
    }
}

fn as_claimed(
    what: &str,
    node: &DeviceNode,
    is: NodeKind,
    found: &NodeInfo,
) -> Result<(), Problem> {
    if let Some(said) = node.kind.filter(|said| *said != is) {
        return differs(
            what,
            format!("{said:?}").to_lowercase(),
            format!("{is:?}").to_lowercase(),
        );
    }
    let numbers = [
        ("major", node.major, found.major),
        ("minor", node.minor, found.minor),
    ];
    for (which, said, is) in numbers {
        if let Some(said) = said.filter(|said| *said != is) {
            let refused: Result<(), Problem> =
                differs(what, format!("{which} {said}"), format!("{which} {is}"));
            // The device may have been plugged in again since the driver looked: a later prepare sees the new number.
            return refused.map_err(|problem| Problem {
                kind: ProblemKind::Unavailable,
                ..problem
            });
        }
    }
    Ok(())
}

fn differs(what: &str, said: String, is: String) -> Result<(), Problem> {
    Err(wrong(
        what,
        format!("the driver says {said}, and it is {is}"),
    ))
}

#[cfg(test)]
mod tests;
