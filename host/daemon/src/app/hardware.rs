//! A recorded machine in place of the node's own hardware: a directory below the root that the daemon may change, made of a snapshot.
//!
//! The directory outlives a crash of the daemon, as the state of a kernel does, and is made again for another snapshot or another boot.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use nodedock_base::file;
use nodedock_core::hardware::{Hardware, NodeNumbers};
use nodedock_hardware::{NodeKind as RecordedKind, Snapshot};
use nodedock_model::NodeKind;
use sha2::{Digest, Sha256};

/// File that names the snapshot and the boot of the directory beside it.
const MARK: &str = "hardware.of";

/// Returns the hardware of a snapshot, in `directory`.
pub fn simulated(snapshot: &Path, directory: &Path, boot_id: &str) -> Result<Hardware> {
    let recorded = Snapshot::open(snapshot)?;
    let mark = format!("{} {boot_id}\n", digest(&recorded));
    let marks = directory.with_file_name(MARK);
    // A machine whose mark cannot be read keeps what was written to it.
    if file::is_file(&marks)? && fs::read(&marks)? == mark.as_bytes() {
        return Ok(Hardware::simulated(directory));
    }
    make(&recorded, directory, &marks).with_context(|| {
        format!(
            "make the machine of {} in {}",
            snapshot.display(),
            directory.display()
        )
    })?;
    fs::write(&marks, mark).with_context(|| format!("write {}", marks.display()))?;
    tracing::info!(snapshot = %snapshot.display(), entries = recorded.len(), "runs on a recorded machine");
    Ok(Hardware::simulated(directory))
}

fn make(recorded: &Snapshot, directory: &Path, mark: &Path) -> Result<()> {
    // The mark first: it must not name a machine that is made in part.
    for removed in [fs::remove_file(mark), fs::remove_dir_all(directory)] {
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    recorded.write_to(directory)?;
    for part in ["sys", "dev", "proc/self"] {
        fs::create_dir_all(directory.join(part))?;
    }
    // Nothing of a recorded machine is mounted, unless the recording says so.
    let mounts = directory.join("proc/self/mountinfo");
    if !mounts.try_exists()? {
        fs::write(mounts, "")?;
    }
    for (path, node) in recorded.nodes() {
        let kind = match node.kind {
            RecordedKind::Character => NodeKind::Character,
            RecordedKind::Block => NodeKind::Block,
        };
        let node = NodeNumbers {
            kind,
            major: node.major,
            minor: node.minor,
        };
        let path = directory.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().context("a node has a directory")?)?;
        fs::write(path, format!("{node}\n"))?;
    }
    for (link, device) in recorded.numbers() {
        let link = directory.join("sys/dev").join(link);
        fs::create_dir_all(link.parent().context("a link has a directory")?)?;
        match symlink(Path::new("../..").join(device), link) {
            // As recorded.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
    }
    Ok(())
}

/// Returns a digest of the recording, which does not depend on the form of the snapshot.
fn digest(recorded: &Snapshot) -> String {
    let mut hash = Sha256::new();
    for (path, entry) in recorded.entries() {
        hash.update(format!("{path}\0{entry:?}\n"));
    }
    hex::encode(hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_boot_creates_one_simulated_machine() {
        let dir = tempfile::tempdir().unwrap();
        let card = dir
            .path()
            .join("snapshot/sys/devices/pci0000:00/0000:00:02.0/drm/card0");
        fs::create_dir_all(&card).unwrap();
        fs::write(
            card.join("uevent"),
            "MAJOR=226\nMINOR=0\nDEVNAME=dri/card0\n",
        )
        .unwrap();
        fs::write(card.join("value"), "1\n").unwrap();
        let (snapshot, directory) = (dir.path().join("snapshot"), dir.path().join("hardware"));
        let value = "sys/devices/pci0000:00/0000:00:02.0/drm/card0/value";

        let hardware = simulated(&snapshot, &directory, "boot-1").unwrap();
        let node = hardware.node("/dev/dri/card0").unwrap().unwrap();
        assert_eq!(
            (node.kind, node.major, node.minor),
            (NodeKind::Character, 226, 0)
        );
        fs::write(directory.join(value), "2\n").unwrap();
        simulated(&snapshot, &directory, "boot-1").unwrap();
        assert_eq!(
            fs::read_to_string(directory.join(value)).unwrap(),
            "2\n",
            "as after a crash of the daemon"
        );
        simulated(&snapshot, &directory, "boot-2").unwrap();
        assert_eq!(
            fs::read_to_string(directory.join(value)).unwrap(),
            "1\n",
            "as after a reboot"
        );
        assert_eq!(
            fs::read_to_string(snapshot.join(value)).unwrap(),
            "1\n",
            "the snapshot is read only"
        );
    }

    #[test]
    fn incomplete_machine_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let (good, bad) = (dir.path().join("good"), dir.path().join("bad"));
        for (snapshot, nodes) in [(&good, "DEVNAME=a\n"), (&bad, "DEVNAME=a/b\n")] {
            let device = snapshot.join("sys/devices/a");
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("uevent"), format!("MAJOR=1\nMINOR=2\n{nodes}")).unwrap();
        }
        // A directory cannot be made where the recording has a file.
        fs::create_dir_all(bad.join("dev")).unwrap();
        fs::write(bad.join("dev/a"), "character 1:1\n").unwrap();
        let directory = dir.path().join("hardware");
        simulated(&good, &directory, "boot-1").unwrap();
        assert!(simulated(&bad, &directory, "boot-1").is_err());
        assert!(
            directory.join("sys/devices/a/uevent").exists(),
            "it failed half-way"
        );

        let node = simulated(&good, &directory, "boot-1")
            .unwrap()
            .node("/dev/a")
            .unwrap()
            .unwrap();
        assert_eq!((node.major, node.minor), (1, 2));
    }

    #[test]
    fn missing_snapshot_is_an_error() {
        assert!(simulated(Path::new("/nonexistent.tar"), Path::new("/tmp"), "b").is_err());
    }
}
