//! The name of this node, as the flags, the config file or the host have it. Which name the node takes is decided at its start
//! (`app/node_name.rs`).

use super::SettingsError;
use nodedock_model::ObjectName;

/// Name of a host that has none, or one without a letter or a digit.
const UNNAMED: &str = "localhost";

/// A name for this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeName {
    pub name: ObjectName,
    /// True if the name comes from the flags or the file, not from the host.
    pub is_configured: bool,
}

impl NodeName {
    /// Puts flags, file and host together. Names of hosts may have upper-case letters, those of nodes may not.
    pub(super) fn resolve(configured: Option<&str>, host: &str) -> Result<Self, SettingsError> {
        let Some(text) = configured else {
            return Ok(Self {
                name: of_host(host),
                is_configured: false,
            });
        };
        let name =
            ObjectName::new(text.to_lowercase()).map_err(|error| SettingsError::NodeName {
                name: text.to_owned(),
                rule: error.to_string(),
            })?;
        Ok(Self {
            name,
            is_configured: true,
        })
    }
}

/// Returns the name of a host as a node may have it: in lower case, with `-` for what a name may not have, such as `_`.
fn of_host(host: &str) -> ObjectName {
    let text: String = host
        .to_lowercase()
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c
            } else {
                '-'
            }
        })
        .collect();
    let labels = text
        .split('.')
        .map(|label| label.trim_matches('-'))
        .filter(|label| !label.is_empty());
    ObjectName::new(labels.collect::<Vec<_>>().join("."))
        .unwrap_or_else(|_| ObjectName::new(UNNAMED).expect("it is a DNS label"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hostname_yields_a_node_name() {
        let long = "x".repeat(300);
        for (host, node) in [
            ("node-1", "node-1"),
            ("Lab_PC-1", "lab-pc-1"),
            (
                "ip-10-0-131-7.eu-central-1.compute.internal",
                "ip-10-0-131-7.eu-central-1.compute.internal",
            ),
            ("(none)", "none"),
            ("-a..b-.", "a.b"),
            ("größe", "gr--e"),
            ("", UNNAMED),
            ("...", UNNAMED),
            ("___", UNNAMED),
            (&long, UNNAMED),
        ] {
            let found = NodeName::resolve(None, host).unwrap();
            assert_eq!(
                (found.name.as_str(), found.is_configured),
                (node, false),
                "{host}"
            );
        }
    }

    #[test]
    fn invalid_configured_node_name_is_refused() {
        let found = NodeName::resolve(Some("Host"), "other").unwrap();
        assert_eq!((found.name.as_str(), found.is_configured), ("host", true));
        for bad in ["", "lab_pc", "my host", "a/b", "-a", &"x".repeat(254)] {
            let error = NodeName::resolve(Some(bad), "other").unwrap_err();
            assert!(
                matches!(&error, SettingsError::NodeName { name, .. } if name == bad),
                "{error}"
            );
        }
    }
}
