//! Whole CDI specs that other programs wrote, as container runtimes read them: YAML or JSON, each file a spec of one kind.
//!
//! Is given a directory, and returns a spec or an error for each file in it that is not of a Nodedock daemon. Never writes. Blocking functions.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nodedock_model::yaml::{self, Aliases};
use serde_json::Value;

use super::identity::MARK;
use super::spec::Spec;
use super::stamp::{is_spec_name, open_plain};
use super::validate::{SpecError, validate};

/// Bytes of a file that are read. The spec of a machine with eight GPUs has 60 kB.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Spec files of a directory, without those of daemons: vendors' tools write one or two.
const FILES_MAX: usize = 1024;
/// Bytes of the kind, and of a device's name: two of each are in an identity string, and one in an attribute.
const NAME_BYTES_MAX: usize = 60;
/// The versions of the specification that have the fields of [`Spec`] and no others.
const VERSIONS: [&str; 8] = [
    "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
];

const EDITS: &[&str] = &[
    "env",
    "deviceNodes",
    "netDevices",
    "hooks",
    "mounts",
    "intelRdt",
    "additionalGids",
];
/// The lists of edits with the fields of their entries.
const LISTS: [(&str, &[&str]); 4] = [
    (
        "deviceNodes",
        &[
            "path",
            "hostPath",
            "type",
            "major",
            "minor",
            "fileMode",
            "permissions",
            "uid",
            "gid",
        ],
    ),
    ("netDevices", &["hostInterfaceName", "name"]),
    ("hooks", &["hookName", "path", "args", "env", "timeout"]),
    ("mounts", &["hostPath", "containerPath", "type", "options"]),
];
const RDT: &[&str] = &["closID", "schemata", "enableMonitoring"];

/// The specs of a directory by their files. A file that is gone while the directory is read is not among them.
pub type Specs = BTreeMap<PathBuf, Result<Spec, ForeignError>>;

/// Why a file or a directory has no spec.
#[derive(Debug, thiserror::Error)]
pub enum ForeignError {
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    #[error("it has more than {FILES_MAX} spec files")]
    TooManyFiles,
    #[error("it is no plain file, or a link")]
    NotPlain,
    #[error("it has more than {FILE_BYTES_MAX} bytes")]
    TooLarge,
    #[error("it is not UTF-8 text")]
    NotText,
    #[error("it is neither YAML nor JSON")]
    Syntax(#[source] yaml::SyntaxError),
    #[error("it has the CDI version {0:?}, and 0.3.0 to 1.1.0 are supported")]
    Version(String),
    #[error("{place} has the field {field:?}, which is not supported")]
    Field { place: String, field: String },
    #[error("it is no CDI spec")]
    Shape(#[from] serde_json::Error),
    #[error("it is no valid CDI spec")]
    Spec(#[from] SpecError),
    #[error("the name {0:?} has more than {NAME_BYTES_MAX} bytes")]
    LongName(String),
}

impl ForeignError {
    /// Returns whether the content is unknown, and not wrong.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Read(_))
    }
}

/// Reads the specs of a directory. One that does not exist has none.
pub fn read(directory: &Path) -> Result<Specs, ForeignError> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Specs::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if name.is_some_and(is_spec_name) {
            paths.push(path);
        }
    }
    let read = paths
        .into_iter()
        .filter_map(|path| Some((read_file(&path).transpose()?, path)));
    let specs: Specs = read.map(|(spec, path)| (path, spec)).collect();
    if specs.len() > FILES_MAX {
        return Err(ForeignError::TooManyFiles);
    }
    Ok(specs)
}

/// `None`: the file is gone, or belongs to a Nodedock daemon.
fn read_file(path: &Path) -> Result<Option<Spec>, ForeignError> {
    let opened = match open_plain(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut file = opened.ok_or(ForeignError::NotPlain)?;
    let mut bytes = Vec::new();
    let beginning = MARK.len() as u64;
    file.by_ref().take(beginning).read_to_end(&mut bytes)?;
    if bytes == MARK.as_bytes() {
        return Ok(None);
    }
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(ForeignError::TooLarge);
    }
    let text = String::from_utf8(bytes).map_err(|_| ForeignError::NotText)?;
    let spec = parse(&text)?;
    check_names(&spec)?;
    Ok(Some(spec))
}

/// Refuses names that have no place in identity strings and attributes.
fn check_names(spec: &Spec) -> Result<(), ForeignError> {
    let names = spec.devices.iter().map(|device| &device.name);
    let mut names = names.chain([&spec.kind]);
    match names.find(|name| name.len() > NAME_BYTES_MAX) {
        Some(name) => Err(ForeignError::LongName(name.clone())),
        None => Ok(()),
    }
}

/// Parses a spec of any program, and refuses one that runtimes refuse, or with a field that a copy would lose.
pub fn parse(text: &str) -> Result<Spec, ForeignError> {
    // As Go's libraries read it.
    let mut spec = yaml::document(text, Aliases::Expanded).map_err(ForeignError::Syntax)?;
    remove_nulls(&mut spec);
    let version = spec["cdiVersion"].as_str().unwrap_or_default();
    if !VERSIONS.contains(&version) {
        return Err(ForeignError::Version(version.chars().take(64).collect()));
    }
    check_fields(&spec)?;
    let spec: Spec = serde_json::from_value(spec)?;
    validate(&spec)?;
    Ok(spec)
}

/// Removes fields without a value: Go's libraries write and read an absent list as `null`.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

fn check_fields(spec: &Value) -> Result<(), ForeignError> {
    let top = [
        "cdiVersion",
        "kind",
        "annotations",
        "devices",
        "containerEdits",
    ];
    check(spec, "the spec", &top)?;
    check_edits(&spec["containerEdits"])?;
    for device in items(&spec["devices"]) {
        check(
            device,
            "a device",
            &["name", "annotations", "containerEdits"],
        )?;
        check_edits(&device["containerEdits"])?;
    }
    Ok(())
}

fn check_edits(edits: &Value) -> Result<(), ForeignError> {
    check(edits, "containerEdits", EDITS)?;
    check(&edits["intelRdt"], "intelRdt", RDT)?;
    for (list, fields) in LISTS {
        for item in items(&edits[list]) {
            check(item, list, fields)?;
        }
    }
    Ok(())
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn check(value: &Value, place: &str, fields: &[&str]) -> Result<(), ForeignError> {
    let mut names = value
        .as_object()
        .into_iter()
        .flat_map(|object| object.keys());
    match names.find(|name| !fields.contains(&name.as_str())) {
        None => Ok(()),
        Some(field) => Err(ForeignError::Field {
            place: place.to_owned(),
            field: field.chars().take(64).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    const VALID: &str = "cdiVersion: 0.5.0\nkind: example.com/gpu\ndevices:\n- name: \"0\"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/gpu0\n";

    fn refused(text: &str) -> String {
        chain(&parse(text).unwrap_err())
    }

    #[test]
    fn vendor_spec_is_read_whole() {
        let spec = parse(&VALID.replace(
            "- path: /dev/gpu0",
            "- {path: /dev/gpu0, fileMode: 0660, uid: 0}\n    mounts: null\n  annotations: {a: b}",
        ))
        .unwrap();
        let node = &spec.devices[0].container_edits.device_nodes[0];
        assert_eq!(
            (
                node.path.as_str(),
                node.permissions.as_str(),
                node.file_mode
            ),
            ("/dev/gpu0", "rwm", Some(0o660))
        );
    }

    #[test]
    fn wrong_spec_is_refused_by_name() {
        for (from, to, part) in [
            ("0.5.0", "2.0.0", "CDI version \"2.0.0\""),
            ("cdiVersion: 0.5.0\n", "", "CDI version \"\""),
            ("kind: example.com/gpu", "kind: gpu", "the kind \"gpu\""),
            ("\"0\"", "0", "invalid type: integer"),
            (
                "- path: /dev/gpu0",
                "- path: /dev/gpu0\n      mode: 1",
                "deviceNodes has the field \"mode\"",
            ),
            (
                "deviceNodes:",
                "shares:",
                "containerEdits has the field \"shares\"",
            ),
            ("devices:", "device:", "the spec has the field \"device\""),
            ("kind:", "\tkind:", "neither YAML nor JSON"),
        ] {
            let text = VALID.replacen(from, to, 1);
            assert_ne!(text, VALID);
            let error = refused(&text);
            assert!(error.contains(part), "{error}");
        }
        assert!(refused("").contains("CDI version"));
        let long = VALID.replace("\"0\"", &format!("a{}", "0".repeat(63)));
        let error = check_names(&parse(&long).unwrap()).unwrap_err();
        assert!(error.to_string().contains("more than 60 bytes"), "{error}");
    }

    #[test]
    fn only_files_of_others_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        assert_eq!(read(&path("absent")).unwrap().len(), 0);
        std::fs::write(path("a.yaml"), VALID).unwrap();
        std::fs::write(path("ours.yaml"), format!("{MARK}{{}}\n{VALID}")).unwrap();
        std::fs::write(path("notes.txt"), "x").unwrap();
        std::fs::write(path("bytes.json"), [0xff]).unwrap();
        std::fs::create_dir(path("dir.json")).unwrap();
        std::os::unix::fs::symlink(path("a.yaml"), path("link.yaml")).unwrap();
        let large = std::fs::File::create(path("large.json")).unwrap();
        large.set_len(FILE_BYTES_MAX + 1).unwrap();
        let found = read(directory.path()).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|(path, spec)| {
                let name = path.file_name().unwrap().to_str().unwrap();
                (name, spec.as_ref().map(drop).map_err(|error| chain(error)))
            })
            .collect();
        let error = |text: &str| Err(text.to_owned());
        assert_eq!(
            found,
            [
                ("a.yaml", Ok(())),
                ("bytes.json", error("it is not UTF-8 text")),
                ("dir.json", error("it is no plain file, or a link")),
                ("large.json", error("it has more than 4194304 bytes")),
                ("link.yaml", error("it is no plain file, or a link")),
            ]
        );
        assert!(read(&path("a.yaml")).unwrap_err().is_unknown());
    }
}
