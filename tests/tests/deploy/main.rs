//! What is in `deploy/`: objects that a cluster takes, rights that are no more than needed, figures that somebody serves.

mod chart;
mod dashboard;
mod objects;
mod rights;
mod unit;
