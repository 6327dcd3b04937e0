//! The section `cdiDriver`: the host's own driver of devices in CDI specs.

use std::path::PathBuf;

use serde::Deserialize;

use super::values;
use nodedock_base::paths::Paths;
use nodedock_core::cdi_driver::{CdiAnswer, CdiDriverSettings, CdiKinds};
use nodedock_model::DriverName;

/// The driver's name unless set.
const NAME: &str = "cdi.nodedock.dev";

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CdiDriverSection {
    /// True if devices of CDI specs can be claimed; false unless set.
    pub enabled: bool,
    /// Name of the driver; `cdi.nodedock.dev` unless set.
    pub driver: Option<DriverName>,
    /// Globs of the kinds that are offered; all but those of claims unless set.
    pub kinds: Option<CdiKinds>,
    /// Directories of specs by ascending precedence; those of the container runtimes unless set.
    #[serde(deserialize_with = "values::directories")]
    pub directories: Option<Vec<PathBuf>>,
    /// Answer for a prepared device; `names` unless set.
    pub answer: CdiAnswer,
}

impl CdiDriverSection {
    /// `None`: the driver is not enabled.
    pub(super) fn resolve(&self, paths: &Paths) -> Option<CdiDriverSettings> {
        let default = || DriverName::new(NAME).expect("it is a driver's name");
        let directories = self.directories.as_ref().unwrap_or(&paths.cdi_spec_dirs);
        self.enabled.then(|| CdiDriverSettings {
            driver: self.driver.clone().unwrap_or_else(default),
            kinds: self.kinds.clone(),
            directories: directories.clone(),
            answer: self.answer,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::ConfigFile;
    use nodedock_base::error::chain;

    fn parse(section: &str) -> Result<CdiDriverSection, String> {
        let text = format!("cdiDriver:\n  {section}\n");
        let file = ConfigFile::parse(&text, Path::new("config.yaml"));
        file.map(|file| file.cdi_driver)
            .map_err(|error| chain(&error))
    }

    #[test]
    fn cdi_driver_is_off_by_default() {
        let paths = Paths::below(Path::new("/r"));
        let resolve = |section| parse(section).unwrap().resolve(&paths);
        assert_eq!(resolve("driver: a.example.com"), None);
        let plain = resolve("enabled: true").unwrap();
        assert_eq!(plain.driver.as_str(), NAME);
        assert_eq!(plain.directories, paths.cdi_spec_dirs);
        assert_eq!((plain.kinds, plain.answer), (None, CdiAnswer::Names));
        let set = "{enabled: true, kinds: [\"nvidia.com/*\"], directories: [/x], answer: edits}";
        let set = resolve(set).unwrap();
        assert_eq!(set.directories, [Path::new("/x")]);
        assert_eq!(set.answer, CdiAnswer::Edits);
        assert!(set.kinds.is_some());
    }

    #[test]
    fn wrong_key_has_its_line() {
        for (section, part) in [
            ("enable: true", "enable"),
            ("driver: \"-\"", "driver name"),
            ("kinds: [gpu]", "\"gpu\" is not VENDOR/CLASS"),
            ("kinds: [\"a/[\"]", "is no glob"),
            ("directories: [etc/cdi]", "is not an absolute path"),
            ("answer: both", "both"),
        ] {
            let error = parse(section).unwrap_err();
            assert!(error.contains(part) && error.contains("line 2"), "{error}");
        }
        let many = vec!["\"a/b\""; 65].join(", ");
        assert!(
            parse(&format!("kinds: [{many}]"))
                .unwrap_err()
                .contains("65 kinds")
        );
    }
}
