//! The context of a call: what the host passes to every function of a driver.

use serde::de::DeserializeOwned;

use crate::{Problem, parse_json};

/// The context of a call: what the host passes to every function of a driver.
///
/// ```
/// use nodedock_sdk::Context;
///
/// #[derive(serde::Deserialize)]
/// struct Config {
///     #[serde(default)]
///     shared: bool,
/// }
///
/// let ctx = Context { config: r#"{"shared": true}"#.into(), ..Context::default() };
/// assert!(ctx.config::<Config>()?.shared);
/// assert_eq!(ctx.fact("kernel"), None);
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Identifies the operation in all of its log lines.
    pub request_id: String,
    /// Name of the Kubernetes node.
    pub node_name: String,
    /// ID of the current boot of the node.
    pub boot_id: String,
    /// Start of the call, in milliseconds since the Unix epoch. A driver has no other clock.
    pub now_ms: u64,
    /// The operator's config for this driver as JSON; `{}` without a config.
    pub config: String,
    /// Facts about the node, by name. Later versions of the host may add facts; ignore those that you do not know.
    pub facts: Vec<(String, String)>,
}

impl Default for Context {
    /// Creates a context for tests: node `node`, an empty config, the epoch as time.
    fn default() -> Self {
        Context {
            request_id: "request".into(),
            node_name: "node".into(),
            boot_id: "boot".into(),
            now_ms: 0,
            config: "{}".into(),
            facts: Vec::new(),
        }
    }
}

impl Context {
    /// Parses the operator's config.
    ///
    /// # Errors
    ///
    /// `invalid`, code `bad-config`, with serde's message, which names the field and the position.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        parse_json("bad-config", "config of the driver", &self.config)
    }

    /// Returns the fact of this name, if the host has it.
    pub fn fact(&self, name: &str) -> Option<&str> {
        self.facts
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }
}

/// Reason for a discovery. A driver that always scans everything ignores it.
///
/// ```
/// use nodedock_sdk::Trigger;
///
/// fn looks_at(trigger: &Trigger, directory: &str) -> bool {
///     match trigger {
///         Trigger::Events(changed) => changed.iter().any(|path| path.starts_with(directory)),
///         _ => true,
///     }
/// }
/// assert!(looks_at(&Trigger::Load, "devices/virtual/misc"));
/// assert!(!looks_at(&Trigger::Events(vec!["devices/virtual/net/lo".into()]), "devices/virtual/misc"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// The driver was loaded.
    Load,
    /// The discovery period has elapsed.
    Timer,
    /// The kernel reported changes: directories in `/sys` of the devices that changed.
    Events(Vec<String>),
    /// A client requested it.
    Request,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemKind;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Config {
        #[serde(default)]
        count: u32,
    }

    #[test]
    fn config_parses_into_driver_type() {
        let ctx = Context {
            config: r#"{"count": 3}"#.into(),
            ..Context::default()
        };
        assert_eq!(ctx.config::<Config>(), Ok(Config { count: 3 }));
        assert_eq!(
            Context::default().config::<Config>(),
            Ok(Config { count: 0 })
        );
    }

    #[test]
    fn bad_config_names_the_position() {
        let ctx = Context {
            config: "{\n  \"count\": -1\n}".into(),
            ..Context::default()
        };
        let problem = ctx.config::<Config>().unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Invalid, "bad-config")
        );
        assert!(
            problem.message.contains("line 2 column 13"),
            "{}",
            problem.message
        );
    }

    #[test]
    fn facts_are_found_by_name() {
        let ctx = Context {
            facts: vec![("kernel".into(), "6.18".into())],
            ..Context::default()
        };
        assert_eq!((ctx.fact("kernel"), ctx.fact("arch")), (Some("6.18"), None));
    }
}
