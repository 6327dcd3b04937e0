//! Snapshots of machines.

use nodedock_hardware::{Entry, Snapshot};

/// A snapshot that is read is written as an archive and read back as it was, and is one without its identifiers too.
pub fn snapshot(data: &[u8]) -> bool {
    let Ok(snapshot) = Snapshot::from_archive("snapshot", data) else {
        return false;
    };
    assert_eq!(snapshot.get("/sys"), Some(&Entry::Directory));
    assert!(reread(&snapshot) == snapshot, "written and read back");
    let (redacted, counts) = snapshot.clone().redacted(&[]);
    assert!(redacted.len() + counts.dropped <= snapshot.len());
    assert!(
        reread(&redacted) == redacted,
        "without identifiers, written and read back"
    );
    true
}

fn reread(snapshot: &Snapshot) -> Snapshot {
    let mut archive = Vec::new();
    snapshot
        .write_archive(&mut archive)
        .expect("memory has room");
    Snapshot::from_archive("written", archive.as_slice()).expect("what was read once is a snapshot")
}
