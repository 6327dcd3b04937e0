//! Container edits of CDI devices by their qualified names, from the files of CDI's directories.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nodedock_core::cdi::{Spec, foreign};
use nodedock_model::Edits;

use super::shown;

/// Bytes of a file that are read: more than the daemon writes.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// A device, and the file that has it.
struct Found {
    directory: usize,
    file: PathBuf,
    /// Of all devices of the file.
    shared: Edits,
    own: Edits,
    is_double: bool,
}

/// Returns the edits of devices, those of a file before those of its devices, as CDI's own library does (`Cache.InjectDevices`). `directories`: a
/// device of a later one replaces that of an earlier one.
///
/// # Errors
///
/// A device is in no file that can be read, or in two of one directory.
pub(super) fn edits(directories: &[PathBuf], devices: &[String]) -> Result<Vec<Edits>> {
    let mut found: BTreeMap<&str, Found> = BTreeMap::new();
    let mut unreadable = Vec::new();
    for (number, directory) in directories.iter().enumerate() {
        for file in files(directory)? {
            match read(&file) {
                Ok(spec) => add(&mut found, devices, (number, &file), &spec),
                Err(error) => unreadable.push(format!("{}: {error:#}", file.display())),
            }
        }
    }
    let mut edits = Vec::new();
    let mut shared_of = Vec::new();
    for device in devices {
        let Some(found) = found.remove(device.as_str()) else {
            let unreadable = unreadable.join("; ");
            let rest = if unreadable.is_empty() {
                ""
            } else {
                "; files that cannot be read: "
            };
            bail!(
                "CDI device {device} is in no file of {}{rest}{unreadable}",
                shown(directories)
            );
        };
        if found.is_double {
            bail!(
                "CDI device {device} is in two files of {}",
                directories[found.directory].display()
            );
        }
        if !shared_of.contains(&found.file) {
            edits.push(found.shared);
            shared_of.push(found.file);
        }
        edits.push(found.own);
    }
    Ok(edits)
}

fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let listed = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.and_then(|entries| {
            let paths = entries.map(|entry| entry.map(|entry| entry.path()));
            paths.collect::<std::io::Result<Vec<_>>>()
        }),
    };
    let mut files = listed.with_context(|| format!("list {}", directory.display()))?;
    files.retain(|path| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("json" | "yaml"))
    });
    files.sort();
    Ok(files)
}

fn read(file: &Path) -> Result<Spec> {
    let size = std::fs::metadata(file)?.len();
    if size > FILE_BYTES_MAX {
        bail!("it has more than {FILE_BYTES_MAX} bytes");
    }
    Ok(foreign::parse(&std::fs::read_to_string(file)?)?)
}

fn add<'a>(
    found: &mut BTreeMap<&'a str, Found>,
    wanted: &'a [String],
    (directory, file): (usize, &Path),
    spec: &Spec,
) {
    for device in &spec.devices {
        let qualified = format!("{}={}", spec.kind, device.name);
        let Some(name) = wanted.iter().find(|name| **name == qualified) else {
            continue;
        };
        let before = found.get(name.as_str());
        let entry = Found {
            directory,
            file: file.to_owned(),
            shared: spec.container_edits.clone(),
            own: device.container_edits.clone(),
            is_double: before.is_some_and(|before| before.directory == directory),
        };
        found.insert(name, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    fn variables(edits: &[Edits]) -> Vec<String> {
        let variables = edits.iter().flat_map(|edits| &edits.env);
        variables
            .map(|(name, value)| format!("{name}={value}"))
            .collect()
    }

    const TWO: &str = r#"{"cdiVersion": "0.5.0", "kind": "v.com/gpu", "containerEdits": {"env": ["ALL=1"]},
        "devices": [{"name": "0", "containerEdits": {"env": ["A=0"], "deviceNodes": [{"path": "/dev/null"}]}},
                    {"name": "1", "containerEdits": {"env": ["A=1"]}}]}"#;

    #[test]
    fn later_directories_replace_devices() {
        let first = directory(&[("a.json", TWO), ("b.txt", "no spec"), ("c.yaml", "{")]);
        let second = directory(&[(
            "x.yaml",
            "cdiVersion: 0.3.0\nkind: v.com/gpu\ndevices:\n- {name: '1', containerEdits: {env: [A=new]}}\n",
        )]);
        let both = [first.path().to_owned(), second.path().to_owned()];
        let names = ["v.com/gpu=0".to_owned(), "v.com/gpu=1".to_owned()];
        let found = edits(&both, &names).unwrap();
        assert_eq!(variables(&found), ["ALL=1", "A=0", "A=new"]);
        assert_eq!(found[1].device_nodes[0].permissions, "rwm");
        let one = edits(&both[..1], &names).unwrap();
        assert_eq!(variables(&one), ["ALL=1", "A=0", "A=1"]);
    }

    #[test]
    fn unusable_devices_are_named() {
        let newer = TWO.replace("0.5.0", "1.2.0").replace("gpu", "new");
        let bad = TWO.replace("\"A=0\"", "\"A\"").replace("gpu", "bad");
        let files = [
            ("a.json", TWO),
            ("b.json", TWO),
            ("n.json", &newer),
            ("w.json", &bad),
            ("x.yaml", "{"),
        ];
        let directory = directory(&files);
        let at = [directory.path().to_owned(), "/nothing".into()];
        for (device, words) in [
            ("v.com/gpu=0", "in two files"),
            ("v.com/gpu=7", "x.yaml"),
            ("v.com/new=0", "n.json: it has the CDI version \"1.2.0\""),
            ("v.com/bad=0", "\"A\" is not NAME=VALUE"),
        ] {
            let error = format!("{:#}", edits(&at, &[device.to_owned()]).unwrap_err());
            assert!(error.contains(words) && error.contains(device), "{error}");
        }
    }
}
