//! Configuration of the local API: claims, classes and slices on a machine without a cluster.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Deserialize;

use super::cdi_files::group_of_machine;
use super::{SettingsError, values};
use nodedock_model::ObjectName;

/// The section of the config file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LocalApiSection {
    /// True if the API is served on a Unix socket; false unless set.
    pub enabled: Option<bool>,
    /// Loopback address and port on which it is served besides, with TLS and a token; none unless set.
    #[serde(deserialize_with = "values::address")]
    pub listen: Option<SocketAddr>,
    /// Name or number of the group whose members may have claims of their own; none unless set.
    pub group: Option<String>,
    /// Devices that the claims of such a user may ask for together; any number unless set.
    pub devices_per_user: Option<u32>,
    /// The same by DeviceClass.
    pub devices_per_user_and_class: BTreeMap<String, u32>,
}

/// Flags and environment variables, which win over the section.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LocalApiFlags {
    /// Serve resource.k8s.io/v1 on ROOT/run/nodedock/api.sock, and allocate devices to its claims: for a machine without a cluster
    #[arg(id = "local-api", long = "local-api", env = "NODEDOCK_LOCAL_API", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub enabled: Option<bool>,
    /// Serve it also on this loopback address, with TLS and a token (`nodedock kubeconfig`), for kubectl and native drivers
    #[arg(long, value_name = "ADDRESS:PORT", env = "NODEDOCK_LOCAL_API_LISTEN")]
    pub local_api_listen: Option<SocketAddr>,
}

/// The local API of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalApiConfig {
    /// Name of the Node object.
    pub node: ObjectName,
    pub listen: Option<SocketAddr>,
    /// `None`: root alone may have claims.
    pub users: Option<UsersConfig>,
}

/// Users other than root who may have claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsersConfig {
    /// Number of the group whose members they are.
    pub group: u32,
    /// Devices that the claims of one of them may ask for together. `None`: any number.
    pub devices: Option<u32>,
    /// The same by DeviceClass.
    pub devices_by_class: BTreeMap<String, u32>,
}

/// Puts flags and file together. None: there is no local API. `node`: of the flags, the file or the host.
pub(super) fn resolve(
    flags: &LocalApiFlags,
    section: &LocalApiSection,
    node: &ObjectName,
    is_kubernetes: bool,
) -> Result<Option<LocalApiConfig>, SettingsError> {
    let listen = flags.local_api_listen.or(section.listen);
    if !flags.enabled.or(section.enabled).unwrap_or(false) {
        return match flags.local_api_listen {
            Some(_) => Err(SettingsError::ListensToNothing),
            None => Ok(None),
        };
    }
    if is_kubernetes {
        return Err(SettingsError::LocalApiInCluster);
    }
    if let Some(address) = listen.filter(|address| !address.ip().is_loopback()) {
        return Err(SettingsError::NotLoopback(address));
    }
    Ok(Some(LocalApiConfig {
        node: node.clone(),
        listen,
        users: users(section)?,
    }))
}

fn users(section: &LocalApiSection) -> Result<Option<UsersConfig>, SettingsError> {
    let LocalApiSection {
        group,
        devices_per_user,
        devices_per_user_and_class,
        ..
    } = section;
    let Some(group) = group else {
        let is_stray = devices_per_user.is_some() || !devices_per_user_and_class.is_empty();
        return match is_stray {
            true => Err(SettingsError::QuotaWithoutGroup),
            false => Ok(None),
        };
    };
    Ok(Some(UsersConfig {
        group: group_of_machine("localApi.group", group)?,
        devices: *devices_per_user,
        devices_by_class: devices_per_user_and_class.clone(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> ObjectName {
        ObjectName::new("node-1").unwrap()
    }

    fn on(listen: Option<&str>) -> LocalApiFlags {
        let local_api_listen = listen.map(|address| address.parse().unwrap());
        LocalApiFlags {
            enabled: Some(true),
            local_api_listen,
        }
    }

    #[test]
    fn local_api_is_off_by_default() {
        let section = LocalApiSection {
            enabled: Some(true),
            listen: "127.0.0.1:1".parse().ok(),
            ..LocalApiSection::default()
        };
        let off = LocalApiFlags {
            enabled: Some(false),
            ..LocalApiFlags::default()
        };
        assert_eq!(
            resolve(
                &LocalApiFlags::default(),
                &LocalApiSection::default(),
                &node(),
                false
            ),
            Ok(None)
        );
        assert_eq!(resolve(&off, &section, &node(), false), Ok(None));
        let found = resolve(&on(Some("[::1]:2")), &section, &node(), false)
            .unwrap()
            .unwrap();
        assert_eq!((found.node, found.listen), (node(), "[::1]:2".parse().ok()));
        let found = resolve(&LocalApiFlags::default(), &section, &node(), false)
            .unwrap()
            .unwrap();
        assert_eq!(found.listen, section.listen);
    }

    #[test]
    fn group_and_quota_of_users() {
        let mut section = LocalApiSection {
            enabled: Some(true),
            devices_per_user: Some(2),
            ..LocalApiSection::default()
        };
        let resolved = |section: &LocalApiSection| {
            let found = resolve(&LocalApiFlags::default(), section, &node(), false)?;
            Ok(found.unwrap().users)
        };
        assert_eq!(resolved(&section), Err(SettingsError::QuotaWithoutGroup));
        section.group = Some("4711".to_owned());
        let expected = UsersConfig {
            group: 4711,
            devices: Some(2),
            devices_by_class: BTreeMap::new(),
        };
        assert_eq!(resolved(&section), Ok(Some(expected)));
        section.group = Some("no such group".to_owned());
        let error = resolved(&section).unwrap_err().to_string();
        assert!(
            error.contains("localApi.group") && error.contains("no such group"),
            "{error}"
        );
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let section = LocalApiSection::default();
        let refused =
            |flags, in_cluster| resolve(&flags, &section, &node(), in_cluster).unwrap_err();
        assert_eq!(refused(on(None), true), SettingsError::LocalApiInCluster);
        let open = "0.0.0.0:80";
        assert_eq!(
            refused(on(Some(open)), false),
            SettingsError::NotLoopback(open.parse().unwrap())
        );
        let stray = LocalApiFlags {
            enabled: None,
            ..on(Some(open))
        };
        assert_eq!(refused(stray, false), SettingsError::ListensToNothing);
    }
}
