//! Objects in the files of a command: `-f` as `kubectl` has it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nodedock_apiserver::unknown_fields;
use nodedock_core::manifest;
use nodedock_kube::local_client::is_foreign;
use serde_json::Value;

use super::CommandError;
use super::local_api::text;
use super::output::print_error;

/// Standard input, in the place of a file.
const STDIN: &str = "-";
/// Files of a directory that are read, by their extension.
const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];

/// The name and the content of a file.
pub(super) struct File {
    pub(super) name: String,
    pub(super) text: String,
}

/// Reads files, the YAML and JSON files of directories (not of those in them), sorted by name, and standard input where the name is `-`.
///
/// # Errors
///
/// One cannot be read or is larger than 4 MiB, a directory has no such file, or standard input is given twice.
pub(super) fn read(given: &[PathBuf]) -> Result<Vec<File>> {
    if given.iter().filter(|path| is_stdin(path)).count() > 1 {
        let hint = "give `-` once";
        return Err(CommandError::usage("standard input can be read once", hint).into());
    }
    let mut files = Vec::new();
    for path in given {
        if is_stdin(path) {
            let name = Path::new("standard input");
            let text = manifest::text_from(std::io::stdin().lock(), name)?;
            let name = name.display().to_string();
            files.push(File { name, text });
        } else if is_directory(path)? {
            for path in of_directory(path)? {
                files.push(file(&path)?);
            }
        } else {
            files.push(file(path)?);
        }
    }
    Ok(files)
}

fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == STDIN
}

fn is_directory(path: &Path) -> Result<bool> {
    let found = nodedock_base::file::metadata(path);
    let found = found.with_context(|| format!("look at {}", path.display()))?;
    Ok(found.is_some_and(|found| found.is_dir()))
}

fn file(path: &Path) -> Result<File> {
    let text = manifest::text_of(path)?;
    let name = path.display().to_string();
    Ok(File { name, text })
}

fn of_directory(directory: &Path) -> Result<Vec<PathBuf>> {
    let shown = directory.display();
    let entries = std::fs::read_dir(directory).with_context(|| format!("read {shown}"))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("read {shown}"))?.path();
        let extension = path.extension().and_then(|of| of.to_str());
        if extension.is_some_and(|of| EXTENSIONS.contains(&of)) && !is_directory(&path)? {
            paths.push(path);
        }
    }
    paths.sort();
    if paths.is_empty() {
        bail!("{shown} has no file that ends with .json, .yaml or .yml");
    }
    Ok(paths)
}

/// Reads the objects of files that the local API can hold, each with where it is. The others are skipped with a line on standard error.
///
/// # Errors
///
/// A file cannot be read, an object has no `apiVersion` or no `kind`, or there is no object.
pub(super) fn objects(given: &[PathBuf]) -> Result<Vec<(String, Value)>> {
    let mut objects = Vec::new();
    for File { name, text: of } in read(given)? {
        let documents = manifest::documents(&of, &name)?;
        for (index, object) in documents.into_iter().enumerate() {
            let at = format!("{name}, object {}", index + 1);
            let [version, kind] = ["/apiVersion", "/kind"].map(|field| text(&object, field));
            if version.is_empty() || kind.is_empty() {
                bail!("{at}: apiVersion and kind are wanted, as in every Kubernetes object");
            }
            if is_foreign(&object) {
                let object_name = text(&object, "/metadata/name");
                skipped(&format!("{at}: {kind} {object_name} ({version})"));
            } else {
                objects.push((at, object));
            }
        }
    }
    if objects.is_empty() {
        bail!("there is no object for this command");
    }
    Ok(objects)
}

/// Writes a line about an object that a command does not read.
pub(super) fn skipped(object: &str) {
    print_error(&format!(
        "skipped: {object}: this command has no use for its kind"
    ));
}

/// Fails for the first of the objects that has a field which its kind does not have.
pub(super) fn check_fields(objects: &[(String, Value)]) -> Result<()> {
    for (at, object) in objects {
        let unknown = unknown_fields(text(object, "/kind"), object);
        if !unknown.is_empty() {
            bail!("{at}: {}", unknown.join(", "));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIM: &str =
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: one}\n";

    #[test]
    fn directory_and_lists_are_read_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let list = CLAIM.replace("name: one", "name: two");
        let list = format!(
            "apiVersion: v1\nkind: List\nitems:\n- {}",
            list.trim_end().replace('\n', "\n  ")
        );
        std::fs::write(at("b.yaml"), list).unwrap();
        let foreign = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n";
        std::fs::write(at("a.yml"), format!("{foreign}---\n{CLAIM}")).unwrap();
        std::fs::write(at("notes.txt"), "no: [").unwrap();
        std::fs::create_dir(at("c.yaml")).unwrap();
        let found = objects(&[directory.path().to_owned()]).unwrap();
        let names: Vec<_> = found
            .iter()
            .map(|(_, object)| text(object, "/metadata/name"))
            .collect();
        assert_eq!(names, ["one", "two"]);
        assert!(found[0].0.ends_with("a.yml, object 2"), "{}", found[0].0);
    }

    #[test]
    fn unusable_files_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        let error = |paths: &[PathBuf]| objects(paths).unwrap_err().to_string();
        let empty = error(&[directory.path().to_owned()]);
        assert!(empty.contains("has no file that ends with"), "{empty}");
        let file = directory.path().join("all.yaml");
        for (text, expected) in [
            ("kind: Pod\n", "object 1: apiVersion and kind are wanted"),
            (
                "apiVersion: v1\nkind: Service\n",
                "there is no object for this command",
            ),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = error(std::slice::from_ref(&file));
            assert!(error.contains(expected), "{error}");
        }
        let twice = error(&[STDIN.into(), STDIN.into()]);
        assert_eq!(twice, "standard input can be read once");
    }

    #[test]
    fn misspelt_field_is_named_by_path() {
        let of = |text: &str| {
            let object = manifest::documents(text, "claim.yaml").unwrap().remove(0);
            check_fields(&[("claim.yaml, object 1".to_owned(), object)])
        };
        let spec = "spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu, selectrs: []}}]}}\n";
        let error = of(&format!("{CLAIM}{spec}")).unwrap_err().to_string();
        let expected =
            "claim.yaml, object 1: unknown field \"spec.devices.requests[0].exactly.selectrs\"";
        assert_eq!(error, expected);
        of(&format!("{CLAIM}{}", spec.replace("selectrs", "selectors"))).unwrap();
    }
}
