//! Nodedock's protocols and the Rust that is generated from them.

pub mod codec;
mod json;

pub use json::rfc3339;
pub use prost;

/// The node API, `nodedock.node.v1`.
pub mod node {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("nodedock.node.v1");
    }
}

/// The kubelet's node APIs, as compatible protocol files with the same encoding.
pub mod kubelet {
    /// Plugin registration, `pluginregistration`.
    pub mod registration {
        include!(concat!(
            env!("OUT_DIR"),
            "/registration/pluginregistration.rs"
        ));
    }

    /// Dynamic resource allocation.
    pub mod dra {
        /// `k8s.io.kubelet.pkg.apis.dra.v1`.
        pub mod v1 {
            include!(concat!(
                env!("OUT_DIR"),
                "/dra_v1/k8s.io.kubelet.pkg.apis.dra.v1.rs"
            ));
            crate::claim_map::by_claim_uid!();
        }

        /// Package `v1alpha2`.
        pub mod v1alpha2 {
            include!(concat!(env!("OUT_DIR"), "/dra_v1alpha2/v1alpha2.rs"));
        }

        /// Package `v1alpha3`.
        pub mod v1alpha3 {
            include!(concat!(env!("OUT_DIR"), "/dra_v1alpha3/v1alpha3.rs"));
            crate::claim_map::by_claim_uid!();
        }

        /// `k8s.io.kubelet.pkg.apis.dra.v1beta1`.
        pub mod v1beta1 {
            include!(concat!(
                env!("OUT_DIR"),
                "/dra_v1beta1/k8s.io.kubelet.pkg.apis.dra.v1beta1.rs"
            ));
            crate::claim_map::by_claim_uid!();
        }
    }

    /// Health of DRA devices.
    pub mod dra_health {
        /// Package `v1`.
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/dra_health_v1/v1.rs"));
        }

        /// Package `v1alpha1`.
        pub mod v1alpha1 {
            include!(concat!(env!("OUT_DIR"), "/dra_health_v1alpha1/v1alpha1.rs"));
        }
    }

    /// Device plugins.
    pub mod device_plugin {
        /// Package `v1beta1`.
        pub mod v1beta1 {
            include!(concat!(
                env!("OUT_DIR"),
                "/device_plugin_v1beta1/v1beta1.rs"
            ));
        }
    }

    /// Pods.
    pub mod pods {
        /// Package `v1alpha1`.
        pub mod v1alpha1 {
            include!(concat!(env!("OUT_DIR"), "/pods_v1alpha1/v1alpha1.rs"));
        }
    }

    /// Pod resources.
    pub mod pod_resources {
        /// Package `v1`.
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/pod_resources_v1/v1.rs"));
        }

        /// Package `v1alpha1`.
        pub mod v1alpha1 {
            include!(concat!(
                env!("OUT_DIR"),
                "/pod_resources_v1alpha1/v1alpha1.rs"
            ));
        }
    }
}

pub mod unix;

/// Entry point of the fuzz target `http2`. Not in shipped builds.
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz {
    pub use crate::unix::fuzz::http2;
}

/// DRA answers are maps by claim UID, generated as lists of entries (`build.rs` says why).
mod claim_map {
    macro_rules! by_claim_uid {
        () => {
            crate::claim_map::by_claim_uid!(
                NodePrepareResourcesResponse,
                NodePrepareResourceResponse,
                node_prepare_resources_response
            );
            crate::claim_map::by_claim_uid!(
                NodeUnprepareResourcesResponse,
                NodeUnprepareResourceResponse,
                node_unprepare_resources_response
            );
        };
        ($answer:ident, $one:ident, $entries:ident) => {
            impl $answer {
                /// Returns the results by claim UID. Of two entries for one UID the later one counts; a value that is missing on the wire
                /// is empty.
                pub fn into_claims(self) -> ::std::collections::BTreeMap<String, $one> {
                    self.claims
                        .into_iter()
                        .map(|entry| (entry.key, entry.value.unwrap_or_default()))
                        .collect()
                }
            }

            /// Conversion from claim UIDs and their answers; an empty answer is written too.
            impl FromIterator<(String, $one)> for $answer {
                fn from_iter<I: IntoIterator<Item = (String, $one)>>(claims: I) -> Self {
                    let entry = |(key, value)| $entries::ClaimsEntry {
                        key,
                        value: Some(value),
                    };
                    Self {
                        claims: claims.into_iter().map(entry).collect(),
                    }
                }
            }
        };
    }

    pub(crate) use by_claim_uid;
}
