//! Names of pools in the API.
//!
//! A driver gives its pools the same names on every node, and the API identifies a device by driver, pool and device alone: if two nodes
//! published the same pool, a device allocated on one would count as allocated on the other. So the published name starts with the
//! node's name, unless the driver itself names its pool after the node.

use nodedock_model::{NameError, PoolName};

/// How the API names of pools derive from the drivers' names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolNames {
    /// Unchanged: the drivers' configs make them different on each node.
    Plain,
    /// `NODE/POOL`, for the node of this name.
    OfNode(String),
}

impl PoolNames {
    /// Returns the name in the API. Fails if it is longer than a name may be.
    pub fn published(&self, pool: &PoolName) -> Result<PoolName, NameError> {
        match self {
            Self::OfNode(node) if pool.as_str() != node => PoolName::new(format!("{node}/{pool}")),
            Self::OfNode(_) | Self::Plain => Ok(pool.clone()),
        }
    }

    /// Returns the driver's name of a published pool. A pool of another node keeps its name, which no driver here has.
    pub fn local<'a>(&self, pool: &'a str) -> &'a str {
        match self {
            Self::OfNode(node) => {
                pool.strip_prefix(node.as_str()).and_then(|rest| rest.strip_prefix('/')).unwrap_or(pool)
            }
            Self::Plain => pool,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_pools_are_different_on_each_node_and_can_be_reversed() {
        let names = PoolNames::OfNode("node-1".to_owned());
        for (own, published) in [
            ("leds", "node-1/leds"),
            ("node-1", "node-1"),
            ("node-1/x", "node-1/node-1/x"),
            ("node-2", "node-1/node-2"),
        ] {
            let own = PoolName::new(own).unwrap();
            assert_eq!(names.published(&own).unwrap().as_str(), published);
            assert_eq!(names.local(published), own.as_str());
        }
        assert_eq!(names.local("node-2/leds"), "node-2/leds");
        assert_eq!(names.local("node-10"), "node-10");
        assert_eq!(PoolNames::Plain.local("node-1/leds"), "node-1/leds");
        let long = PoolName::new(["a".repeat(60).as_str(); 4].join(".")).unwrap();
        assert!(PoolNames::OfNode("n".repeat(60)).published(&long).is_err());
    }
}
