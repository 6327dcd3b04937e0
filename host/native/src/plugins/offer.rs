//! Parses a plugin's GetInfo response. Pure.

use std::path::{Component, Path, PathBuf};

use crate::grpc::{DraService, HealthService, PluginInfo};
use nodedock_base::printable;
use nodedock_model::{DriverName, ExtendedResource, NameError, limit};

const DEVICE_PLUGIN_VERSION: &str = "v1beta1";
/// Bytes of a plugin's text in errors to the plugin and in states.
const SHOWN_BYTES_MAX: usize = 300;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Offer {
    Dra(DraOffer),
    DevicePlugin {
        resource: ExtendedResource,
        endpoint: PathBuf,
    },
}

impl Offer {
    pub(super) fn endpoint(&self) -> &Path {
        match self {
            Self::Dra(offer) => &offer.endpoint,
            Self::DevicePlugin { endpoint, .. } => endpoint,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DraOffer {
    pub(super) name: DriverName,
    pub(super) endpoint: PathBuf,
    pub(super) service: DraService,
    pub(super) health: Option<HealthService>,
    pub(super) services: Vec<String>,
}

/// Why an offer is refused. The texts contain a kubelet's texts, so that a search finds them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum OfferError {
    #[error("no handler registered for plugin type: {0} (DRAPlugin and DevicePlugin are served)")]
    UnknownType(String),
    #[error("plugin validation failed with err: {0}")]
    Name(#[from] NameError),
    #[error("plugin validation failed with err: empty list of supported gRPC services")]
    NoServices,
    #[error(
        "plugin validation failed with err: none of services supported by the plugin ({offered}) are supported here ({served})"
    )]
    NoCommonService {
        offered: String,
        served: &'static str,
    },
    #[error("plugin validation failed with err: endpoint {endpoint}: {why}")]
    EndpointFile { endpoint: String, why: String },
    #[error("plugin validation failed with err: endpoint {0} is not an absolute path without '..'")]
    EndpointPath(String),
    #[error(
        "plugin validation failed with err: endpoint {endpoint} has {length} bytes, and a socket's path has at most {}",
        limit::SOCKET_PATH_BYTES_MAX
    )]
    EndpointLength { endpoint: String, length: usize },
}

/// Parses a plugin's GetInfo response.
pub(super) fn read(info: PluginInfo, socket: &Path) -> Result<Offer, OfferError> {
    match info.kind.as_str() {
        "DRAPlugin" => dra(info, socket).map(Offer::Dra),
        "DevicePlugin" => device_plugin(&info, socket),
        other => Err(OfferError::UnknownType(shown(other))),
    }
}

fn dra(info: PluginInfo, socket: &Path) -> Result<DraOffer, OfferError> {
    let name = DriverName::new(&info.name)?;
    let endpoint = endpoint(&info.endpoint, socket)?;
    let listed = |wanted: &str| info.services.iter().any(|service| service == wanted);
    let is_old = info.services.iter().any(|service| is_former(service));
    let service = DraService::ALL
        .into_iter()
        .find(|service| listed(service.listed_as()))
        .or(is_old.then_some(DraService::Alpha));
    let health = HealthService::ALL
        .into_iter()
        .find(|service| listed(service.listed_as()));
    let service =
        service.ok_or_else(|| no_common(&info.services, "v1.DRAPlugin, v1beta1.DRAPlugin"))?;
    let services = info.services.iter().map(|service| shown(service)).collect();
    Ok(DraOffer {
        name,
        endpoint,
        service,
        health,
        services,
    })
}

/// Plugins before `v1beta1` list a version of the registration: `1.0.0`.
fn is_former(version: &str) -> bool {
    let mut numbers = version.split('.');
    numbers.next() == Some("1")
        && numbers.clone().count() == 2
        && numbers.all(|number| number.parse::<u32>().is_ok())
}

fn device_plugin(info: &PluginInfo, socket: &Path) -> Result<Offer, OfferError> {
    let resource = ExtendedResource::new(&info.name)?;
    let endpoint = endpoint(&info.endpoint, socket)?;
    if !info
        .services
        .iter()
        .any(|version| version == DEVICE_PLUGIN_VERSION)
    {
        return Err(no_common(&info.services, DEVICE_PLUGIN_VERSION));
    }
    Ok(Offer::DevicePlugin { resource, endpoint })
}

fn no_common(offered: &[String], served: &'static str) -> OfferError {
    if offered.is_empty() {
        return OfferError::NoServices;
    }
    OfferError::NoCommonService {
        offered: shown(&offered.join(", ")),
        served,
    }
}

/// Parses the endpoint; empty: the registration socket itself. Removes double slashes and single dots, as a kubelet does.
fn endpoint(endpoint: &Path, socket: &Path) -> Result<PathBuf, OfferError> {
    if endpoint.as_os_str().is_empty() {
        return Ok(socket.to_owned());
    }
    let text = endpoint.to_string_lossy();
    if !endpoint.is_absolute()
        || endpoint
            .components()
            .any(|part| part == Component::ParentDir)
        || text.contains('\0')
    {
        return Err(OfferError::EndpointPath(shown(&text)));
    }
    let length = endpoint.as_os_str().len();
    if length > limit::SOCKET_PATH_BYTES_MAX {
        return Err(OfferError::EndpointLength {
            endpoint: shown(&text),
            length,
        });
    }
    Ok(endpoint.components().collect())
}

fn shown(text: &str) -> String {
    printable::cut(text, SHOWN_BYTES_MAX).replace(printable::is_unprintable, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(kind: &str, name: &str, endpoint: &str, services: &[&str]) -> PluginInfo {
        let services = services
            .iter()
            .map(|service| (*service).to_owned())
            .collect();
        PluginInfo {
            kind: kind.into(),
            name: name.into(),
            endpoint: endpoint.into(),
            services,
        }
    }

    fn offer(endpoint: &str, services: &[&str]) -> Result<Offer, OfferError> {
        read(
            info("DRAPlugin", "gpu.example.com", endpoint, services),
            Path::new("/reg/gpu.sock"),
        )
    }

    fn dra_offer(services: &[&str]) -> DraOffer {
        match offer("/run/dra.sock", services).unwrap() {
            Offer::Dra(offer) => offer,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn newest_offered_version_is_chosen() {
        let both = dra_offer(&[
            "v1beta1.DRAPlugin",
            "v1.DRAPlugin",
            "v1alpha1.DRAResourceHealth",
            "v1.DRAResourceHealth",
        ]);
        assert_eq!(
            (both.service, both.health),
            (DraService::V1, Some(HealthService::V1))
        );
        let old = dra_offer(&["v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"]);
        assert_eq!(
            (old.service, old.health),
            (DraService::V1beta1, Some(HealthService::V1alpha1))
        );
        assert_eq!(dra_offer(&["v1.DRAPlugin"]).health, None);
        let among_strangers = dra_offer(&["v2.DRAPlugin", "v1beta1.DRAPlugin", "another.Service"]);
        assert_eq!(
            (among_strangers.service, among_strangers.health),
            (DraService::V1beta1, None)
        );
    }

    #[test]
    fn unsupported_versions_are_refused() {
        let text = |services: &[&str]| offer("/run/dra.sock", services).unwrap_err().to_string();
        assert!(
            text(&[]).contains(
                "plugin validation failed with err: empty list of supported gRPC services"
            )
        );
        assert_eq!(dra_offer(&["1.0.0"]).service, DraService::Alpha);
        assert_eq!(
            dra_offer(&["1.0.0", "v1beta1.DRAPlugin"]).service,
            DraService::V1beta1
        );
        for other in ["2.0.0", "1.0", "1.0.x", "1.0.0.0", "1..0"] {
            let refusal = text(&[other]);
            let wanted =
                format!("none of services supported by the plugin ({other}) are supported");
            assert!(refusal.contains(&wanted), "{refusal}");
        }
        text(&["k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"]);
        text(&["v1.DRAResourceHealth"]);
    }

    #[test]
    fn other_types_are_refused_by_name() {
        for kind in ["CSIPlugin", "draplugin", "", "X\n"] {
            let error =
                read(info(kind, "a", "/a", &["v1.DRAPlugin"]), Path::new("/s")).unwrap_err();
            assert!(matches!(error, OfferError::UnknownType(_)), "{kind}");
        }
    }

    #[test]
    fn endpoint_is_normalized_or_refused() {
        let endpoint =
            |text: &str| offer(text, &["v1.DRAPlugin"]).map(|offer| offer.endpoint().to_owned());
        assert_eq!(endpoint("").unwrap(), Path::new("/reg/gpu.sock"));
        assert_eq!(
            endpoint("/run//x/./dra.sock").unwrap(),
            Path::new("/run/x/dra.sock")
        );
        let long = format!("/{}", "x".repeat(107));
        for bad in [
            "dra.sock",
            "./dra.sock",
            "/run/../dra.sock",
            "unix:///dra.sock",
            long.as_str(),
            "/a\0b",
        ] {
            assert!(endpoint(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn invalid_driver_name_is_refused() {
        for bad in ["", "gpu_", "a/b", &"a".repeat(64)] {
            assert!(
                read(
                    info("DRAPlugin", bad, "/a", &["v1.DRAPlugin"]),
                    Path::new("/s")
                )
                .is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn device_plugin_needs_resource_and_version() {
        let read = |name, versions: &[&str]| {
            read(
                info("DevicePlugin", name, "/d.sock", versions),
                Path::new("/s"),
            )
        };
        assert!(matches!(
            read("example.com/gpu", &["v1beta1"]),
            Ok(Offer::DevicePlugin { .. })
        ));
        assert!(read("cpu", &["v1beta1"]).is_err());
        assert!(read("example.com/gpu", &["v1"]).is_err());
    }

    #[test]
    fn plugin_text_is_cut_and_cleaned() {
        let text = offer("/a", &[&"9\n".repeat(10_000)])
            .unwrap_err()
            .to_string();
        assert!(text.len() < 600 && !text.contains('\n'));
    }
}
