//! What is in `deploy/`: objects that a cluster takes, rights that are no more than needed, figures that are served.

mod chart;
mod dashboard;
mod objects;
mod rights;
mod unit;
