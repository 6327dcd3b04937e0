//! What every call carries.

use serde::de::DeserializeOwned;

use crate::{Problem, parse_json};

/// What every call carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Runs through all logs of this operation.
    pub request_id: String,
    /// The Kubernetes node.
    pub node_name: String,
    /// Changes with every boot of the node.
    pub boot_id: String,
    /// Milliseconds since the Unix epoch, at the start of the call. The only clock a driver has.
    pub now_ms: u64,
    /// The operator's config of this driver as JSON; `{}` if there is none.
    pub config: String,
    /// Facts about the node that the host may add as it learns to, by name. Ignore those you do not know.
    pub facts: Vec<(String, String)>,
}

impl Default for Context {
    /// A context for tests: node `node`, an empty config, the epoch.
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
    /// The operator's config.
    ///
    /// # Errors
    ///
    /// `invalid`, code `bad-config`, with serde's words, which name the field and the place.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        parse_json("bad-config", "config of the driver", &self.config)
    }

    /// The fact of this name, if the host knows it.
    pub fn fact(&self, name: &str) -> Option<&str> {
        self.facts.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Why a discovery takes place. A driver that always looks at everything ignores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// The driver was loaded.
    Load,
    /// Time has passed.
    Timer,
    /// The kernel reported changes: folders of the devices that changed, below `/sys`.
    Events(Vec<String>),
    /// Somebody asked.
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
    fn a_config_is_read_into_the_drivers_own_type() {
        let ctx = Context { config: r#"{"count": 3}"#.into(), ..Context::default() };
        assert_eq!(ctx.config::<Config>(), Ok(Config { count: 3 }));
        assert_eq!(Context::default().config::<Config>(), Ok(Config { count: 0 }));
    }

    #[test]
    fn a_bad_config_is_refused_with_the_place_of_the_mistake() {
        let ctx = Context { config: "{\n  \"count\": -1\n}".into(), ..Context::default() };
        let problem = ctx.config::<Config>().unwrap_err();
        assert_eq!((problem.kind, problem.code.as_str()), (ProblemKind::Invalid, "bad-config"));
        assert!(problem.message.contains("line 2 column 13"), "{}", problem.message);
    }

    #[test]
    fn facts_are_found_by_name() {
        let ctx = Context { facts: vec![("kernel".into(), "6.18".into())], ..Context::default() };
        assert_eq!((ctx.fact("kernel"), ctx.fact("arch")), (Some("6.18"), None));
    }
}
