//! Names of pools: users, exporters and the API have each with the node's name before it, and drivers know their own without.
//!
//! A driver gives its pools the same names on every node, and the API identifies a device by driver, pool and device alone: if two nodes
//! published the same pool, a device allocated on one would count as allocated on the other. So the published name starts with the
//! node's name, unless the driver itself names its pool after the node. A name of a pool has as many bytes at most as that of a node: where
//! both together are longer, the node's name is shortened.

use super::limit::LABEL_BYTES_MAX;
use super::{NameError, ObjectName, PoolName};

/// Conversion between the drivers' names of pools and their names in the API, `NODE/POOL`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolNames {
    pub node: ObjectName,
}

impl PoolNames {
    /// Returns the name in the API: `NODE/POOL`, with the node's name shortened to 63 bytes if that is too long. Fails if it still is.
    pub fn published(&self, pool: &PoolName) -> Result<PoolName, NameError> {
        if pool.as_str() == self.node.as_str() {
            return Ok(pool.clone());
        }
        let whole = PoolName::new(format!("{}/{pool}", self.node));
        match self.short() {
            Some(short) => whole.or_else(|_| PoolName::new(format!("{short}/{pool}"))),
            None => whole,
        }
    }

    /// The node's name in the names of pools for which the whole is too long.
    fn short(&self) -> Option<ObjectName> {
        let is_long = self.node.as_str().len() > LABEL_BYTES_MAX;
        is_long.then(|| self.node.within(LABEL_BYTES_MAX))
    }

    /// Returns the name in the API, or the driver's own where that is too long: such a pool is not published, so no claim has it.
    pub fn shown(&self, pool: &PoolName) -> PoolName {
        self.published(pool).unwrap_or_else(|_| pool.clone())
    }

    /// Returns whether a published pool is one of this node's, if its driver is one of a file.
    pub fn is_of_node(&self, pool: &PoolName) -> bool {
        pool.as_str() == self.node.as_str() || self.local(pool.as_str()) != pool.as_str()
    }

    /// Returns the driver's name of a published pool. A pool of another node keeps its name, which no driver here has.
    pub fn local<'a>(&self, pool: &'a str) -> &'a str {
        let of = |node: &ObjectName| pool.strip_prefix(node.as_str())?.strip_prefix('/');
        let local = of(&self.node).or_else(|| of(&self.short()?));
        local.unwrap_or(pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_names_are_unique_and_reversible() {
        let names = PoolNames {
            node: ObjectName::new("node-1").unwrap(),
        };
        for (own, published) in [
            ("leds", "node-1/leds"),
            ("node-1", "node-1"),
            ("node-1/x", "node-1/node-1/x"),
            ("node-2", "node-1/node-2"),
        ] {
            let own = PoolName::new(own).unwrap();
            assert_eq!(names.published(&own).unwrap().as_str(), published);
            assert_eq!(names.local(published), own.as_str());
            assert!(
                names.is_of_node(&PoolName::new(published).unwrap()),
                "{published}"
            );
        }
        for other in ["leds", "node-10", "node-10/leds", "node-2/node-1"] {
            assert!(!names.is_of_node(&PoolName::new(other).unwrap()), "{other}");
        }
        assert_eq!(names.local("node-2/leds"), "node-2/leds");
        assert_eq!(names.local("node-10"), "node-10");
        let long = PoolName::new(["a".repeat(60).as_str(); 4].join(".")).unwrap();
        let names = PoolNames {
            node: ObjectName::new("n".repeat(60)).unwrap(),
        };
        assert!(names.published(&long).is_err());
        assert_eq!(names.shown(&long), long);
    }

    #[test]
    fn longest_node_name_leaves_pool_room() {
        let names = |letter: &str| PoolNames {
            node: ObjectName::new(letter.repeat(252) + "1").unwrap(),
        };
        let (own, pool) = (names("n"), PoolName::new("gpus").unwrap());
        let published = own.published(&pool).unwrap();
        assert!(published.as_str().len() < 70, "{published}");
        assert_eq!(own.local(published.as_str()), "gpus");
        assert!(own.is_of_node(&published));
        assert!(!names("m").is_of_node(&published));
        // One that fits has the whole name.
        let own = PoolNames {
            node: ObjectName::new("n".repeat(200)).unwrap(),
        };
        let published = own.published(&pool).unwrap();
        assert_eq!(published.as_str().len(), 205);
        assert_eq!(own.local(published.as_str()), "gpus");
    }
}
