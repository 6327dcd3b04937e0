//! That a kubelet holds a claim, for people and for scripts.

use nodedock_proto::node::v1;
use serde::Serialize;

use nodedock_base::clock::rfc3339;

/// Consumers that a line names.
const NAMED_MAX: usize = 8;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kubelet {
    /// RFC 3339.
    since: String,
    /// Drivers whose parts it holds.
    drivers: Vec<String>,
    /// For whom the claim was reserved when it asked last.
    consumers: Vec<Consumer>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Consumer {
    #[serde(skip_serializing_if = "String::is_empty")]
    api_group: String,
    resource: String,
    name: String,
    uid: String,
}

impl From<v1::KubeletHold> for Kubelet {
    fn from(held: v1::KubeletHold) -> Self {
        let consumer = |consumer: v1::Consumer| {
            let v1::Consumer { api_group, resource, name, uid } = consumer;
            Consumer { api_group, resource, name, uid }
        };
        let consumers = held.consumers.into_iter().map(consumer).collect();
        Self { since: rfc3339(held.since_ms), drivers: held.drivers, consumers }
    }
}

impl Kubelet {
    /// A cell of a table: whoever it is for.
    pub(super) fn brief(&self) -> String {
        let named: Vec<_> = self.consumers.iter().map(|consumer| consumer.name.as_str()).collect();
        if named.is_empty() { "(kubelet)".to_owned() } else { format!("{} (kubelet)", named.join(",")) }
    }

    pub(super) fn words(&self) -> String {
        let consumers = self.consumers.iter().take(NAMED_MAX);
        let mut named: Vec<_> =
            consumers.map(|of| format!("{} {} (UID {})", of.resource, of.name, of.uid)).collect();
        if self.consumers.len() > NAMED_MAX {
            named.push(format!("and {} more", self.consumers.len() - NAMED_MAX));
        }
        let (since, drivers) = (&self.since, self.drivers.join(", "));
        let reserved = if named.is_empty() {
            String::new()
        } else {
            format!("; it is reserved for {}", named.join(", "))
        };
        format!("held by the kubelet since {since}, of {drivers}{reserved}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_is_told_of_with_those_whom_the_claim_is_for() {
        let consumer = |n: usize| v1::Consumer {
            resource: "pods".to_owned(),
            name: format!("p{n}"),
            uid: format!("u{n}"),
            api_group: String::new(),
        };
        let held = |consumers: usize| {
            let drivers = vec!["gpu.example.com".to_owned()];
            Kubelet::from(v1::KubeletHold {
                since_ms: 0,
                drivers,
                consumers: (0..consumers).map(consumer).collect(),
            })
        };
        assert_eq!((held(0).brief().as_str(), held(2).brief().as_str()), ("(kubelet)", "p0,p1 (kubelet)"));
        let words = "held by the kubelet since 1970-01-01T00:00:00.000Z, of gpu.example.com";
        assert_eq!(held(0).words(), words);
        assert_eq!(held(1).words(), format!("{words}; it is reserved for pods p0 (UID u0)"));
        assert!(held(10).words().ends_with("pods p7 (UID u7), and 2 more"), "{}", held(10).words());
    }
}
