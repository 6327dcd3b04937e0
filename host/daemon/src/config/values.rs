//! Values of the config file that are checked as they are read.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use nodedock_model::limit;

/// Reads a number from `MIN` to `MAX`.
pub(super) fn within<'de, D, T, const MIN: u64, const MAX: u64>(
    deserializer: D,
) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Copy + Display + Into<u64>,
{
    let value = Option::<T>::deserialize(deserializer)?;
    match value {
        Some(value) if !(MIN..=MAX).contains(&value.into()) => Err(D::Error::custom(format!(
            "{value} is out of range: {MIN} to {MAX} are allowed"
        ))),
        value => Ok(value),
    }
}

/// Reads an absolute path.
pub(super) fn absolute<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PathBuf>, D::Error> {
    Option::deserialize(deserializer)?
        .map(check_absolute)
        .transpose()
}

/// Reads a bounded list of absolute paths.
pub(super) fn directories<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<PathBuf>>, D::Error> {
    let Some(paths) = Option::<Vec<PathBuf>>::deserialize(deserializer)? else {
        return Ok(None);
    };
    if paths.len() > limit::CDI_DIRECTORIES_MAX {
        let message = format!(
            "{} directories, at most {} are allowed",
            paths.len(),
            limit::CDI_DIRECTORIES_MAX
        );
        return Err(D::Error::custom(message));
    }
    paths
        .into_iter()
        .map(check_absolute)
        .collect::<Result<_, _>>()
        .map(Some)
}

fn check_absolute<E: Error>(path: PathBuf) -> Result<PathBuf, E> {
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(E::custom(format!("{path:?} is not an absolute path")))
    }
}

/// Reads an IP address and a port to listen on.
pub(super) fn address<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<SocketAddr>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let example = "such as 127.0.0.1:9400 or [::1]:9400";
    match text.parse::<SocketAddr>() {
        Err(_) => Err(D::Error::custom(format!(
            "{text:?} is not an IP address and a port, {example}"
        ))),
        Ok(address) if address.port() == 0 => Err(D::Error::custom(format!(
            "{text:?} has port 0, which no client can know"
        ))),
        Ok(address) => Ok(Some(address)),
    }
}
