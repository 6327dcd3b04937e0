//! What pools are called in the API.
//!
//! A driver gives its pools the same names on every node, from a config that is the same everywhere, and the API knows a device by
//! driver, pool and device alone: of two nodes that tell the same pool, one's devices would count as taken when the other's are. So
//! the API's name begins with the node's, unless the driver gives its pool the node's name itself.

use nodedock_model::{NameError, PoolName};

/// How names of pools in the API come from those of drivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolNames {
    /// They are the same: the drivers' configs make them different on each node.
    Plain,
    /// `NODE/POOL`, for the node of this name.
    OfNode(String),
}

impl PoolNames {
    /// The name in the API. The error: it would be longer than a name may be.
    pub fn published(&self, pool: &PoolName) -> Result<PoolName, NameError> {
        match self {
            Self::OfNode(node) if pool.as_str() != node => PoolName::new(format!("{node}/{pool}")),
            Self::OfNode(_) | Self::Plain => Ok(pool.clone()),
        }
    }

    /// The driver's name for a pool of the API. One of another node stays as it is, and no driver knows it.
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
    fn names_of_pools_are_different_on_each_node_and_find_back() {
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
