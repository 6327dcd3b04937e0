//! Opaque parameters for a driver on a command line (JSON, or the name of a file with JSON or YAML), and amounts of capacities.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use nodedock_model::limit::PARAMETERS_BYTES_MAX;
use nodedock_model::quantity;
use nodedock_model::yaml::{self, Aliases};
use serde_json::Value;

/// Maximum size of a file: indented, and with comments, it is larger than its parameters.
const FILE_BYTES_MAX: usize = 16 * PARAMETERS_BYTES_MAX;

/// Reads an argument that is a JSON object, or else the name of a file with one, in JSON or YAML. Returns JSON text of at most 10 KiB, as a claim
/// may have it.
///
/// # Errors
///
/// The file cannot be read, or this is no object, or it is too large.
pub fn read(argument: &str) -> Result<String> {
    let (mut value, from): (Value, _) = if argument.trim_start().starts_with('{') {
        let value = serde_json::from_str(argument).context("the parameters are not valid JSON")?;
        (value, "the parameters".to_owned())
    } else {
        let path = Path::new(argument);
        let text = read_file(path).with_context(|| format!("read parameters from {argument}"))?;
        let from = format!("parameters {argument}");
        let value = yaml::document(&text, Aliases::Expanded)
            .with_context(|| format!("{from} are not valid JSON or YAML"))?;
        (value, from)
    };
    yaml::whole_numbers(&mut value);
    ensure!(
        value.is_object(),
        "{from} are not an object: as in a claim, they are keys with values"
    );
    let json = value.to_string();
    ensure!(
        json.len() <= PARAMETERS_BYTES_MAX,
        "{from} have {} bytes as JSON, and a claim has at most {PARAMETERS_BYTES_MAX}",
        json.len()
    );
    Ok(json)
}

/// Reads arguments `NAME=QUANTITY`, each an amount of a capacity.
///
/// # Errors
///
/// One has another form, or a name occurs twice.
pub fn amounts(arguments: &[String]) -> Result<BTreeMap<String, String>> {
    let mut amounts = BTreeMap::new();
    for argument in arguments {
        let parts = argument.split_once('=');
        let valid = parts.filter(|(name, amount)| {
            !name.is_empty() && quantity::nanos(amount).is_some_and(|amount| amount >= 0)
        });
        let Some((name, amount)) = valid else {
            bail!("{argument:?} is not NAME=QUANTITY, such as memory=8Gi");
        };
        let before = amounts.insert(name.to_owned(), amount.to_owned());
        ensure!(before.is_none(), "capacity {name} is given twice");
    }
    Ok(amounts)
}

fn read_file(path: &Path) -> Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(FILE_BYTES_MAX as u64 + 1)
        .read_to_string(&mut text)?;
    ensure!(
        text.len() <= FILE_BYTES_MAX,
        "it is larger than {FILE_BYTES_MAX} bytes"
    );
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_json_or_a_file() {
        assert_eq!(read(r#" {"a": [1, "b"]}"#).unwrap(), r#"{"a":[1,"b"]}"#);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("parameters.yaml");
        std::fs::write(&path, "# ports\na:\n- 1\n").unwrap();
        assert_eq!(read(path.to_str().unwrap()).unwrap(), r#"{"a":[1]}"#);
        // As in a claim of a file.
        assert_eq!(read(r#"{"a": 8080.0}"#).unwrap(), r#"{"a":8080}"#);
        std::fs::write(&path, "a: 0755\n").unwrap();
        assert_eq!(read(path.to_str().unwrap()).unwrap(), r#"{"a":493}"#);
    }

    #[test]
    fn amounts_are_quantities_by_name() {
        let amounts = |arguments: &[&str]| {
            let arguments: Vec<_> = arguments.iter().map(|&text| text.to_owned()).collect();
            super::amounts(&arguments)
        };
        let both = amounts(&["memory=8Gi", "d.dev/cores=4"]).unwrap();
        assert_eq!(
            (both["memory"].as_str(), both["d.dev/cores"].as_str()),
            ("8Gi", "4")
        );
        for bad in ["memory", "=1", "memory=", "memory=many", "memory=-1"] {
            let error = amounts(&[bad]).unwrap_err().to_string();
            assert!(error.contains(bad), "{error}");
        }
        assert!(amounts(&["memory=1", "memory=2"]).is_err());
    }

    #[test]
    fn bad_parameters_name_what_is_wrong() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let cases = [
            (r#"{"a": "#.to_owned(), "not valid JSON"),
            (file("broken", "a: [1"), "not valid JSON or YAML"),
            (
                "/nowhere/parameters.json".to_owned(),
                "/nowhere/parameters.json",
            ),
            (file("list", "- 1"), "are not an object"),
            (
                file("long", &format!("a: {}", "x".repeat(PARAMETERS_BYTES_MAX))),
                "at most 10240",
            ),
            (
                file("longer", &" ".repeat(FILE_BYTES_MAX + 1)),
                "larger than",
            ),
        ];
        for (argument, says) in cases {
            let error = format!("{:#}", read(&argument).unwrap_err());
            assert!(error.contains(says), "{says}: {error}");
        }
    }
}
