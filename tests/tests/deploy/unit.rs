//! The unit for machines without Kubernetes.

use std::process::Command;

use nodedock_tests::machine::{program, skip};

use crate::objects::deploy;

/// Checks the unit by systemd's own tool, with the program at its installed path.
#[test]
fn the_unit_is_what_systemd_knows() {
    let Some(analyze) = program("systemd-analyze") else {
        return skip("the systemd unit", "systemd-analyze is not installed");
    };
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(deploy().join("systemd/nodedock.service")).unwrap();
    let installed = nodedock_tests::places::nodedockd().display().to_string();
    let check = |text: &str| {
        let unit = dir.path().join("nodedock.service");
        std::fs::write(&unit, text).unwrap();
        let output = Command::new(&analyze)
            .arg("verify")
            .arg("--man=no")
            .arg(&unit)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // It looks at what else the machine has, too; what it says of this unit names it.
        said.lines()
            .filter(|line| line.contains("nodedock.service"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let here = text.replace("/usr/bin/nodedockd", &installed);
    assert_eq!(check(&here), Vec::<String>::new());
    let wrong = here.replace("Restart=always", "Restart=whenever");
    assert_eq!(check(&wrong).len(), 1, "what is wrong is seen");
}
