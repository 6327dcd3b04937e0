//! The section `driverImages`: directories with one driver each, such as mounted OCI images.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use nodedock_model::limit;
use nodedock_wasm::driver_image::DriverImage;

/// An entry as it is written, and checked.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverImageEntry {
    name: String,
    directory: PathBuf,
}

impl DriverImageEntry {
    /// The image, with its grant and its config beside the daemon's config.
    pub(super) fn image(&self, config: &Path) -> DriverImage {
        let side_files = match config.parent() {
            Some(parent) if parent != Path::new("") => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        DriverImage {
            name: self.name.clone(),
            directory: self.directory.clone(),
            side_files,
        }
    }

    fn check(&self) -> Result<(), String> {
        let Self { name, directory } = self;
        let max = limit::DRIVER_IMAGE_NAME_BYTES_MAX;
        if !is_name(name) || name.len() > max {
            return Err(format!(
                "driverImages: name {name:?} is not 1 to {max} lowercase letters, digits, '-' and '.', with a letter or digit at both ends"
            ));
        }
        if !directory.is_absolute() {
            return Err(format!(
                "driverImages: directory {directory:?} of {name} is not an absolute path"
            ));
        }
        Ok(())
    }
}

fn is_name(text: &str) -> bool {
    text.starts_with(is_alphanumeric)
        && text.ends_with(is_alphanumeric)
        && text
            .chars()
            .all(|c| is_alphanumeric(c) || c == '-' || c == '.')
}

fn is_alphanumeric(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit()
}

/// Reads the entries: a bounded number with different names.
pub(super) fn entries<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<DriverImageEntry>, D::Error> {
    let entries = Option::<Vec<DriverImageEntry>>::deserialize(deserializer)?.unwrap_or_default();
    let max = limit::DRIVER_IMAGES_MAX;
    if entries.len() > max {
        let message = format!(
            "driverImages has {} entries, at most {max} are allowed",
            entries.len()
        );
        return Err(D::Error::custom(message));
    }
    let mut names = BTreeSet::new();
    for entry in &entries {
        entry.check().map_err(D::Error::custom)?;
        if !names.insert(entry.name.as_str()) {
            return Err(D::Error::custom(format!(
                "driverImages has two entries named {}",
                entry.name
            )));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::{ConfigFile, Flags};
    use nodedock_base::error::chain;

    fn read(entries: &str) -> Result<ConfigFile, String> {
        let text = format!("driverImages: {entries}\n");
        ConfigFile::parse(&text, Path::new("config.yaml")).map_err(|error| chain(&error))
    }

    #[test]
    fn image_settings_are_beside_daemon_config() {
        let file =
            read("[{name: gpu, directory: /drivers/gpu}, {name: nic.v2, directory: /x}]").unwrap();
        let images = |config: &str| {
            let flags = Flags {
                config: Some(config.into()),
                ..Flags::default()
            };
            Config::new(Path::new("/"), None, flags, file.clone())
                .unwrap()
                .drivers
                .images
        };
        let gpu = DriverImage {
            name: "gpu".to_owned(),
            directory: "/drivers/gpu".into(),
            side_files: "/etc/nodedock".into(),
        };
        assert_eq!(images("/etc/nodedock/config.yaml")[0], gpu);
        assert_eq!(images("config.yaml")[1].side_files, Path::new("."));
        assert_eq!(read("").unwrap().driver_images, []);
        assert_eq!(file.needs_restart(&ConfigFile::default()), [""; 0]);
    }

    #[test]
    fn invalid_image_entry_names_its_field() {
        let many: String = (0..65)
            .map(|n| format!("{{name: a{n}, directory: /a}}, "))
            .collect();
        for (entries, parts) in [
            ("[{name: gpu}]", &["directory", "line 1"][..]),
            ("[{directory: /a}]", &["name", "line 1"]),
            (
                "[{name: gpu, directory: drivers/gpu}]",
                &["directory \"drivers/gpu\" of gpu", "absolute"],
            ),
            ("[{name: gpu, directory: /a, grant: /b}]", &["grant"]),
            (
                "[{name: gpu, directory: /a}, {name: gpu, directory: /b}]",
                &["two entries named gpu"],
            ),
            (
                "[{name: ../gpu, directory: /a}]",
                &["name \"../gpu\"", "lowercase"],
            ),
            ("[{name: .gpu, directory: /a}]", &["name \".gpu\""]),
            ("[{name: \"\", directory: /a}]", &["name \"\""]),
            ("{gpu: /a}", &["line 1"]),
            (&format!("[{many}]"), &["65 entries", "64"]),
            (
                &format!("[{{name: {}, directory: /a}}]", "g".repeat(57)),
                &["1 to 56"],
            ),
        ] {
            let error = read(entries).unwrap_err();
            assert!(
                parts.iter().all(|part| error.contains(part)),
                "{entries}: {error}"
            );
        }
    }
}
