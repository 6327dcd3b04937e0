//! The section `cdiFiles`: which users may read the files from which container runtimes give devices to containers.

use std::path::Path;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::SettingsError;
use nodedock_base::users;
use nodedock_core::cdi::FileAccess;

/// File with the names of groups.
const GROUPS: &str = "/etc/group";

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CdiFilesSection {
    /// Octal, in quotes; "0644" unless set, with a group "0640".
    #[serde(deserialize_with = "mode")]
    pub mode: Option<u32>,
    /// Name or number; that of the daemon unless set.
    #[serde(deserialize_with = "group")]
    pub group: Option<String>,
}

fn mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let digits = text.strip_prefix('0').unwrap_or(&text);
    let mode = u32::from_str_radix(digits, 8).ok();
    let is_mode =
        digits.len() == 3 && mode.is_some_and(|mode| FileAccess::new(mode, None).is_some());
    match is_mode {
        true => Ok(mode),
        false => Err(D::Error::custom(format!(
            "cdiFiles.mode: {text:?} is none of \"0600\", \"0640\", \"0604\" and \"0644\", the modes with which the daemon alone writes"
        ))),
    }
}

fn group<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let group = Option::<String>::deserialize(deserializer)?;
    match group.as_deref() {
        Some("") => Err(D::Error::custom(
            "cdiFiles.group: it is empty, and has to be the name or number of a group",
        )),
        _ => Ok(group),
    }
}

/// Returns the number of a group of this machine.
pub(super) fn group_of_machine(key: &'static str, name: &str) -> Result<u32, SettingsError> {
    group_number(Path::new(GROUPS), key, name)
}

fn group_number(groups: &Path, key: &'static str, name: &str) -> Result<u32, SettingsError> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let why = match users::group_in(groups, name) {
        Ok(Some(number)) => return Ok(number),
        Ok(None) => format!("{} has none of this name", groups.display()),
        Err(error) => format!("{} cannot be read: {error}", groups.display()),
    };
    Err(SettingsError::Group {
        key,
        name: name.to_owned(),
        why,
    })
}

impl CdiFilesSection {
    /// Looks up the group.
    pub(super) fn resolve(&self) -> Result<FileAccess, SettingsError> {
        self.resolve_in(Path::new(GROUPS))
    }

    fn resolve_in(&self, groups: &Path) -> Result<FileAccess, SettingsError> {
        let group = self.group.as_deref();
        let group = group
            .map(|name| group_number(groups, "cdiFiles.group", name))
            .transpose()?;
        let mode = self
            .mode
            .unwrap_or(if group.is_some() { 0o640 } else { 0o644 });
        Ok(FileAccess::new(mode, group).expect("the mode was checked when it was read"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cdi_group_restricts_the_mode() {
        let directory = tempfile::tempdir().unwrap();
        let groups = directory.path().join("group");
        std::fs::write(&groups, "root:x:0:\npodman:x:991:op\n").unwrap();
        let resolve = |mode, group: Option<&str>| {
            CdiFilesSection {
                mode,
                group: group.map(str::to_owned),
            }
            .resolve_in(&groups)
        };
        assert_eq!(resolve(None, None), Ok(FileAccess::default()));
        let of_group = FileAccess::new(0o640, Some(991)).unwrap();
        assert_eq!(resolve(None, Some("podman")), Ok(of_group));
        assert_eq!(resolve(Some(0o640), Some("991")), Ok(of_group));
        let refused = resolve(None, Some("nowhere")).unwrap_err().to_string();
        assert!(
            refused.starts_with("cdiFiles.group ") && refused.contains("\"nowhere\""),
            "{refused}"
        );
        std::fs::remove_file(&groups).unwrap();
        let refused = resolve(None, Some("podman")).unwrap_err().to_string();
        assert!(refused.contains("cannot be read"), "{refused}");
    }
}
