"""Studies: arms times seeds on one data set, their effects, and the page that reports them."""
